import pytest

from train.rl import language

TEXTS = {
    "latin": "Two trains leave at noon; l'été, naïve façade.",
    "chinese": "两列火车在中午出发，它们什么时候相遇？",
    "japanese": "二台の電車が正午に出発します。いつ会いますか。",
    "korean": "두 기차가 정오에 출발합니다.",
    "cyrillic": "Два поезда выезжают в полдень.",
    "greek": "Δύο τρένα φεύγουν το μεσημέρι.",
    "arabic": "ينطلق قطاران عند الظهر.",
    "hebrew": "שתי רכבות יוצאות בצהריים.",
    "devanagari": "दो रेलगाड़ियाँ दोपहर को निकलती हैं।",
    "bengali": "দুটি ট্রেন দুপুরে ছাড়ে।",
    "tamil": "இரண்டு ரயில்கள் புறப்படுகின்றன.",
    "thai": "รถไฟสองขบวนออกเดินทางตอนเที่ยง",
    "georgian": "ორი მატარებელი შუადღისას გადის.",
    "armenian": "Երկու գնացք մեկնում է կեսօրին։",
}


def test_every_language_has_a_text_here():
    assert set(TEXTS) == set(language.SCRIPTS)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_in_its_own_language_and_in_no_other(name):
    assert language.detect(TEXTS[name]) == name
    assert language.share(TEXTS[name], name) == 1
    for other in set(TEXTS) - {name}:
        if (name, other) != ("chinese", "japanese"):
            shared = language.share(TEXTS[name], other)
            assert shared == 0 or {name, other} == {"chinese", "japanese"}


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("one two three четыре", "latin", 3 / 4),
        ("two поезда", "cyrillic", 1 / 2),
        ("火车 leaves", "chinese", 2 / 3),
        ("火车leaves", "chinese", 2 / 3),  # no space between
        ("火车", "latin", 0),
        ("这是中文句子", "japanese", 0),  # Chinese characters without kana
        ("電車です。这是中文", "japanese", 4 / 8),
        ("so x + y = 2", "latin", 1),
        ("令 x = 2", "chinese", 1),  # variables
        ("令 $velocity = 2$", "chinese", 1),
        ("令 \\frac{1}{2}", "chinese", 1),
        ("令\n```python\nprint(answer)\n```\n则", "chinese", 1),
        ("令 `print(answer)` https://example.org/page", "chinese", 1),
        ("<answer>四</answer>", "chinese", 1),
        ("```never closed", "chinese", 1),
        ("42", "chinese", 1),
        ("", "latin", 1),
    ],
)
def test_the_share_of_words(text, target, expected):
    assert language.share(text, target) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42 + 17", None),
        ("", None),
        ("请用 Python 写一个函数", "chinese"),
        ("求 x", "chinese"),
        ("Translate 火车 into English please", "latin"),
    ],
)
def test_the_language_of_a_prompt(text, expected):
    assert language.detect(text) == expected
