"""The held-out texts stay out of training: by document, by paragraph, and across paragraph breaks."""

import pytest

from recipes.tiny_hybrid import heldout

HELD = "the quick brown fox jumps over the lazy dog and then runs home to sleep until the morning sun returns"
SAFE = "a paragraph about databases that shares no long run of words with anything that was held out of the training"


@pytest.fixture
def grams():
    return heldout.heldout_ngrams([HELD])


def test_a_paragraph_that_quotes_thirteen_words_goes_and_its_neighbours_stay(grams):
    quote = "He said: " + " ".join(HELD.split()[3:16]) + "!"
    text, removed = heldout.without_leaks(f"{SAFE}\n\n{quote}\n\nlast words", grams)
    assert text == f"{SAFE}\n\nlast words"
    assert removed == len(quote)


def test_case_punctuation_and_line_breaks_do_not_hide_a_leak(grams):
    quote = "\n".join(word.upper() + "," for word in HELD.split()[:13])
    assert heldout.without_leaks(f"{quote}\n\n{SAFE}", grams)[0] == SAFE


def test_a_leak_across_a_paragraph_break_takes_both_paragraphs(grams):
    words = HELD.split()
    text = " ".join(words[:7]) + "\n\n" + " ".join(words[7:14]) + f"\n\n{SAFE}"
    assert heldout.without_leaks(text, grams)[0] == SAFE


def test_twelve_words_are_not_a_leak(grams):
    text = " ".join(HELD.split()[:12]) + " something else entirely"
    assert heldout.without_leaks(text, grams) == (text, 0)


@pytest.mark.parametrize(
    ("source", "name", "out"),
    [
        ("web", "Mark 3", True),
        ("kjv", "Mark 3", True),
        ("web", "Ruth 1", True),
        ("kjv", "Jonah 4", True),
        ("kjv", "Matthew 3", False),
        ("henry", "Ruth 2", True),
        ("devil", "SAINT", True),
        ("devil", "TRUTH", True),
        ("devil", "RUIN", False),
        ("sqlite", "autoinc.html", True),
        ("sqlite", "pragma.html", False),
        ("stdlib", "fractions.py", True),
        ("wheels", "sympy/fractions.py", True),
        ("stdlib", "decimal.py", False),
    ],
)
def test_which_documents_are_held_out(source, name, out):
    assert heldout.is_heldout(source, name) is out


def test_overlap_is_the_share_of_the_texts_ngrams():
    text = "one two three four five"
    assert heldout.overlap(text, {("one", "two"), ("four", "five")}, 2) == pytest.approx(0.5)
