import random

from dsv32_jax.generate.pages import ROOT, PagePool


def remember(pool, tokens, n_pages):
    """Take pages for a text and name them."""
    name, pages = ROOT, []
    for i in range(n_pages):
        pages.append(pool.take())
        name = pool.remember(tokens, i, pages[-1], name)
    return pages


def test_a_beginning_is_found_up_to_the_last_page_that_leaves_a_token():
    pool = PagePool(8, 4, lookahead=False)
    text = list(range(13))
    pages = remember(pool, text, 3)
    assert pool.find(text)[0] == pages
    assert pool.find(text[:12])[0] == pages[:2]  # the twelfth token's logits are wanted
    assert pool.find(text[:4])[0] == []
    assert pool.find([0, 1, 2, 3, 9, 9, 9, 9, 9])[0] == pages[:1]
    assert pool.find([9, *text])[0] == []


def test_with_lookahead_the_token_after_a_page_counts():
    pool = PagePool(8, 4, lookahead=True)
    pages = remember(pool, list(range(9)), 2)
    assert pool.find([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])[0] == pages
    assert pool.find([0, 1, 2, 3, 4, 5, 6, 7, 9, 9])[0] == pages[:1]


def test_a_page_goes_when_it_is_needed_the_one_unused_longest_first():
    pool = PagePool(3, 2, lookahead=False)
    texts = [[i, i, 0] for i in range(3)]
    pages = [remember(pool, text, 1)[0] for text in texts]
    assert pool.take() is None
    for page in pages:
        pool.let_go(page)
    assert pool.n_available == 3
    assert pool.find(texts[0])[0] == [pages[0]]  # held again
    assert pool.take() == pages[1]
    assert pool.find(texts[1])[0] == []
    assert pool.find(texts[2])[0] == [pages[2]]


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(2, 2, lookahead=False)
    page = remember(pool, [1, 2, 3], 1)[0]
    assert pool.find([1, 2, 3])[0] == [page]
    pool.let_go(page)
    assert pool.n_available == 1
    pool.let_go(page)
    assert pool.n_available == 2


def test_no_page_is_lost_or_given_twice():
    rng = random.Random(0)
    pool, held = PagePool(16, 2, lookahead=False), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            for page in held.pop(rng.randrange(len(held))):
                pool.let_go(page)
            continue
        text = [rng.randrange(2) for _ in range(7)]
        pages, name = pool.find(text)
        for i in range(len(pages), 3):
            page = pool.take()
            if page is None:
                break
            pages.append(page)
            name = pool.remember(text, i, page, name)
        held.append(pages)
        held_pages = [page for pages in held for page in pages]
        assert pool.n_available == 16 - len(set(held_pages))
