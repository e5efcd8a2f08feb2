"""The page in a real browser, and the command that writes it."""

import json
import re
import shutil
import time

import pytest

from train.evaluation import viewer

HOSTILE = (
    "</script><script>window.harm = 1</script><img src=x onerror='window.harm = 1'>{{7*7}} \u2028"
)


def record(i, **changes):
    """One of many trajectories: every third solved, two environments, three ends."""
    return {
        "policy": f"policy-{i % 2}",
        "environment": ("trips", "sums")[i % 2],
        "task": f"task-{i}",
        "sample": 0,
        "seed": i,
        "end": ("answered", "steps", "tokens")[i % 3],
        "steps": i,
        "tokens": 10 * i,
        "grade": {"score": float(i % 3 == 0), "parts": {"format": 1.0}, "note": "why"},
        "messages": [
            {"role": "system", "content": "You may call tools."},
            {"role": "user", "content": f"question {i}"},
            {
                "role": "assistant",
                "reasoning_content": f"thought {i}",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "add", "arguments": '{"a": 1, "text": "x\\ny"}'}}
                ],
            },
            {"role": "tool", "content": f"result {i}"},
            {"role": "assistant", "content": f"answer {i}"},
        ],
        **changes,
    }


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: apt-get install chromium ({str(error).splitlines()[0]})")
        yield found
        found.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Return a function that writes a page of records and opens it; no request may leave it, nor an error occur."""
    pages, requests, errors = [], [], []

    def open_page(records, title="Trajectories"):
        path = tmp_path / "page.html"
        viewer.write_page(records, path, title=title)
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(path.as_uri())
        page.wait_for_selector("#detail h2")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not errors
    assert all(url.startswith("file://") for url in requests)
    assert len(requests) == len(pages)


def wait_for(page, selector, text):
    page.locator(selector, has_text=re.compile(f"^{re.escape(text)}$")).wait_for()


def listed(page):
    return page.locator("#rows button b").all_inner_texts()


def test_the_list_shows_every_trajectory_and_the_first_is_open(visit):
    page = visit([record(i) for i in range(5)])

    assert listed(page) == [f"task-{i}" for i in range(5)]
    assert page.inner_text("#count") == "5 of 5"
    assert page.inner_text("#detail h2") == "task-0"
    assert page.locator("#rows [aria-current=true] b").inner_text() == "task-0"


@pytest.mark.parametrize(
    ("select", "value", "expected"),
    [
        ("environment", "=sums", [1, 3, 5]),
        ("policy", "=policy-0", [0, 2, 4]),
        ("solved", "=solved", [0, 3]),
        ("end", "=tokens", [2, 5]),
    ],
)
def test_the_list_is_filtered(visit, select, value, expected):
    page = visit([record(i) for i in range(6)])
    page.select_option(f"#{select}", value)

    assert listed(page) == [f"task-{i}" for i in expected]
    assert page.inner_text("#count") == f"{len(expected)} of 6"


def test_filters_and_search_hold_together(visit):
    records = [record(i) for i in range(200)]
    records[130]["messages"][2]["reasoning_content"] = 'He said "Pear"\nand left'
    page = visit(records)
    page.fill("#search", 'said "pear"')
    wait_for(page, "#count", "1 of 200")
    assert listed(page) == ["task-130"]

    page.select_option("#environment", "=sums")
    wait_for(page, "#count", "0 of 200")
    page.fill("#search", "")
    wait_for(page, "#count", "100 of 200")


def test_each_turns_parts_are_folded_and_unfold(visit):
    page = visit([record(i) for i in range(3)])
    page.click("text=task-2")
    wait_for(page, "#detail h2", "task-2")

    titles = page.locator("#detail summary").all_inner_texts()
    assert [title.split()[0] for title in titles] == ["text", "thinking", "call", "result"]
    assert page.locator("#detail details[open]").count() == 0
    assert not page.locator("#detail details pre >> text=thought 2").is_visible()
    page.click("#detail summary >> text=thinking")
    assert page.locator("#detail details pre >> text=thought 2").is_visible()
    page.click("#unfold")
    assert page.locator("#detail details[open]").count() == 4
    assert "a: 1\ntext: x\ny" in page.locator("#detail").inner_text()
    assert page.locator("#detail section.assistant >> text=answer 2").is_visible()
    assert "format: 1" in page.inner_text("#detail table")


def test_the_keys_walk_through_the_filtered_list_and_the_address_names_what_is_open(visit):
    page = visit([record(i) for i in range(6)])
    page.select_option("#solved", "=solved")
    page.click("#detail")
    page.keyboard.press("j")
    wait_for(page, "#detail h2", "task-3")

    assert page.url.endswith("#3")


def test_what_a_model_writes_is_text_wherever_it_stands(visit):
    hostile = record(0, task=HOSTILE, policy=HOSTILE, environment=HOSTILE, end=HOSTILE)
    hostile["grade"]["note"] = HOSTILE
    hostile["messages"] = [
        {"role": HOSTILE, "content": HOSTILE},
        {
            "role": "assistant",
            "reasoning_content": HOSTILE,
            "content": HOSTILE,
            "tool_calls": [{"function": {"name": HOSTILE, "arguments": HOSTILE}}],
        },
        {"role": "tool", "content": json.dumps({"a": HOSTILE})},
    ]
    page = visit([hostile], title=HOSTILE)
    page.click("#unfold")

    assert page.evaluate("window.harm") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3  # the index, one chunk, the page's own
    assert HOSTILE.strip() in page.text_content("#detail h2")
    assert page.text_content("h1") == HOSTILE
    assert page.locator("#detail pre", has_text="window.harm").count() == 5


def test_thousands_of_trajectories_open_at_once_and_are_searched_in_seconds(visit):
    began = time.monotonic()
    page = visit(record(i) for i in range(4000))
    assert page.inner_text("#count") == "4000 of 4000"
    assert len(listed(page)) == 200
    page.click("#more")
    assert len(listed(page)) == 400
    page.fill("#search", "result 3999")
    wait_for(page, "#count", "1 of 4000")
    page.click("#rows button")
    wait_for(page, "#detail h2", "task-3999")

    assert time.monotonic() - began < 30


def test_the_page_names_no_address(tmp_path):
    viewer.write_page([record(0)], tmp_path / "page.html", title="t")
    text = (tmp_path / "page.html").read_text()

    assert not re.findall(r"""https?:|src=|href=|@import|url\(""", text)
    assert "default-src 'none'" in text
    assert "_HASH" not in text
    assert "PAGE_" not in text


def test_the_command_writes_a_page_beside_the_file(tmp_path, capsys):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(3)) + '{"torn": ')

    assert viewer.main([str(path)]) == 0
    assert capsys.readouterr().out == f"3 trajectories in {tmp_path / 'some.html'}\n"
    assert f"<title>{tmp_path.name}</title>" in (tmp_path / "some.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{]\n{}\n", "line 1: not JSON"),
        ('{"messages": 3}\n', "line 1: no trajectory"),
        ("[]\n", "no trajectory"),
    ],
)
def test_what_is_no_trajectory_file_is_told_in_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "some.jsonl"
    path.write_text(text)

    assert viewer.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_file_or_folder_is_told(tmp_path, capsys):
    assert viewer.main([str(tmp_path / "none.jsonl")]) == 2
    assert "no file" in capsys.readouterr().err
