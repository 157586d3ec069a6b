"""The card is made from the run's record: every placeholder is filled and the plots are reproducible."""

from pathlib import Path
from string import Template

from recipes.tiny_hybrid import card, shape

GROUPS = dict.fromkeys(shape.GROUP_WEIGHTS, 1_000_000)
RUN = {
    "step": 40,
    "elapsed": 12.5,
    "tokens": 1_310_720,
    "curve": [
        [20, 6.0, 655360, 1e-3, 5.0, 4.0, 4.5, 4.1, 300000, 0.9],
        [40, 12.5, 1310720, 1e-4, 4.0, 3.0, 3.5, 4.1, 300000, 0.9],
    ],
    "evals": [[20, 6.0, {"text": 1.5, "all": 1.5}], [40, 12.5, {"text": 1.2, "all": 1.2}]],
    "loads": [[1 / 32] * 32] * 9,
    "phases": [[0, 32, 1024, True], [20, 16, 2048, True]],
    "device": "a GPU",
    "versions": {"torch": "2.11"},
    "seed": 21,
    "started_from": "shipped 4-bit weights",
    "earlier": [{"step": 2360, "tokens": 77_332_480, "elapsed": 264.0, "device": "another GPU"}],
    "sizes": {"parameters": {"trunk": 27_000_000, "mtp": 4_000_000}, "tokens": GROUPS},
}
SCORE = {
    "bits_per_byte": 1.25,
    "against_bits_per_byte": 1.2,
    "bytes": 100,
    "tokens": 30,
    "top1_agreement": 0.9,
    "mean_kl_nats": 0.03,
}
QUALITY = {"texts": {"text": SCORE}, "all": SCORE, "window": 2048}
CORPORA = {
    "sources": {"kjv": {"licence": "public domain", "group": "scripture", "characters": 4_000_000}},
    "heldout_overlap": {"13": {"text": 0.0}, "8": {"text": 0.02}},
}
SAMPLES = [{"prompt": "In the", "temperature": 0.0, "text": " beginning"}]


def test_every_placeholder_of_the_template_is_filled():
    facts = {"verified": "agrees", "size": "1"}
    values = card.fields(RUN, CORPORA, QUALITY, QUALITY, SAMPLES, facts)
    text = Template((Path(card.__file__).parent / "card_template.md").read_text()).substitute(values)
    assert "$" not in text
    assert "Cost of quantisation: +0.0500 bits per byte, top-1 agreement 90.00%" in text
    assert "32 x 1024 from step 0; 16 x 2048 from step 20" in text
    assert "| device | a GPU, torch 2.11 |" in text
    assert "| shipped 4-bit weights; before: 2,360 steps, 77.3 M tokens, 264 s on another GPU |" in text
    assert "| seed | 21 |" in text


def test_plots_are_reproducible(tmp_path):
    for draw in (card.plot_curves, card.plot_loads):
        for name in ("a.svg", "b.svg"):
            draw(RUN, tmp_path / name)
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
