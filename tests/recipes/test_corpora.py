"""The corpora script on small documents: the split, the cleaning, and the chat examples."""

import pytest

pytest.importorskip("lxml")

from recipes.tiny_hybrid import chat, corpora, extract, heldout

VERSES = " ".join(f"word{i}" for i in range(40))


def test_held_out_documents_leave_training_and_reach_their_file():
    documents = [("Mark 1", "Mark text"), ("Luke 1", "Luke text"), ("Mark 2", "more Mark")]
    training, kept_out = corpora.split_heldout("web", documents)
    assert training == [("Luke 1", "Luke text")]
    assert kept_out == {"mark_web.txt": ["Mark text", "more Mark"]}


def test_the_other_translation_is_dropped_and_not_kept():
    training, kept_out = corpora.split_heldout("kjv", [("Mark 1", "Mark text"), ("Luke 1", "Luke text")])
    assert training == [("Luke 1", "Luke text")]
    assert kept_out == {}


def test_cleaning_removes_leaks_repeats_and_scraps():
    long = "This paragraph stands in two documents and is longer than eighty characters in all, so once is enough."
    documents = [
        ("a", f"{long}\n\nonly here, in the first of the documents"),
        ("b", f"{long}\n\nthe second document has a line of its own too"),
        ("c", VERSES),
        ("d", "x"),
    ]
    texts, leaked = corpora.clean(documents, heldout.heldout_ngrams([VERSES]), corpora.Deduplicator())
    assert [long in text for text in texts] == [True, False]
    assert not any("word1" in text for text in texts)
    assert leaked == len(VERSES)


def test_html_text_drops_scripts_and_navigation():
    head = b"<html><head><title>t</title></head><body><nav>menu</nav><script>x()</script>"
    page = head + b"<p>One.</p>\n\n\n\n<p>Two.</p></body></html>"
    assert extract.html_text(page) == "One.\n\nTwo."


def test_chat_examples_are_reproducible_and_closed():
    synsets = [
        (["river"], "noun", "a large natural stream", ["the river was wide"]),
        (["Paris"], "noun", "the capital of France", []),
    ]
    make = lambda seed: list(chat.conversations(synsets, [("Genesis 1:1", "In the beginning.")], 60, seed))
    first = make(0)
    assert first == make(0)
    assert first != make(1)
    assert chat.capitals(synsets) == [("France", "Paris")]
    for text in first:
        assert text.count("<|im_start|>") == text.count("<|im_end|>")
        assert text.count("<think>") == text.count("</think>") >= 1
        assert text.count("<tool_call>") == text.count("</function>")
    assert any("<tool_response>" in text for text in first)
