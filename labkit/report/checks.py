"""A check shown to fail where it must: a check that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StayedGreen(AssertionError):
    """A check passed something that was broken on purpose."""


def turns_red(check: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """Run a check on something broken on purpose, and print how it fails.

    Args:
        check: raises AssertionError for what is wrong.
        arguments, keywords: for `check`; somewhere in them sits the mutation.

    Raises:
        StayedGreen: the check passed. Any other exception than AssertionError goes through: the mutation must be caught
            by the check, not by an accident.
    """
    try:
        check(*arguments, **keywords)
    except AssertionError as error:
        print(f"red, as it must be: {str(error).splitlines()[0] if str(error) else 'the assertion fails'}")
    else:
        raise StayedGreen(f"{getattr(check, '__name__', 'the check')} passed what was broken on purpose")
