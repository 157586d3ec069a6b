"""How far apart two correct sides may be, by the coarser of their arithmetics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Bounds of agreement; None leaves a quantity unjudged. Disagreements beyond a near tie are defects in any case.

    Attributes:
        max_logit_difference: nats, at any token of any position.
        max_kl: nats, at any position.
        mean_kl: nats, over all positions.
        perplexity_change: of the candidate against the reference, relative, either way; a larger one passes only where
            its 95 % interval holds zero, which is to say that the positions cannot tell it from none.
    """

    max_logit_difference: float | None = None
    max_kl: float | None = None
    mean_kl: float | None = None
    perplexity_change: float | None = None


# float32: mlx-lm and transformers' torch differ by 1e-4 and 4e-7 at most, which is also how far torch's two forms are
# from each other.
FLOAT32 = Tolerance(max_logit_difference=5e-4, max_kl=1e-6)
# Anything coarser: no bound on a single logit holds for every depth. Stock mlx-lm in bfloat16 on a GPU is 3e-4 from
# float32 on tiny-hybrid.
REDUCED = Tolerance(mean_kl=5e-3, perplexity_change=4e-4)


def tolerance_for(*arithmetics: str) -> Tolerance:
    """The tolerance between sides that compute in these arithmetics ("float32", "tf32", "bfloat16", "float16")."""
    return FLOAT32 if set(arithmetics) == {"float32"} else REDUCED
