"""Checks of single films: unreadable, blank, tiny, coloured, negative, unlike the rest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from afire.data.audit.findings import Finding, films_in_words, it_or_them, single
from afire.data.audit.polarity import Polarity

TINY = 64
"""Films with a side shorter than this (in pixels) hold too little for any task of this package."""
_BLANK_CONTRAST = 0.005  # a standard deviation of one grey level of 255, or less
_MOSTLY_NEGATIVE = 0.2  # share of suspected negatives from which on the set, not a film, is the problem


def check_readable(measured: pd.DataFrame) -> Iterator[Finding]:
    """Films that cannot be read."""
    rows = np.flatnonzero(measured["error"] != "")
    if len(rows):
        it = it_or_them(len(rows))
        yield Finding(
            "error",
            "unreadable",
            f"{films_in_words(len(rows))} cannot be read; repair {it} or drop {it} from the manifest.",
            single(rows),
            tuple(measured["error"].iloc[rows]),
            {"films": len(rows)},
        )


def check_content(measured: pd.DataFrame) -> Iterator[Finding]:
    """Films without content, too small ones, and photos."""
    readable = measured["error"] == ""
    blank = readable & (measured["constant"] | (measured["contrast"] < _BLANK_CONTRAST))
    short = measured[["width", "height"]].min(axis=1)
    tiny, colour = readable & ~blank & (short < TINY), readable & measured["colour"]
    if blank.any():
        count = int(blank.sum())
        sentence = (
            f"{films_in_words(count)} {_have(blank)} the same grey value (almost) everywhere; drop {it_or_them(count)}."
        )
        yield Finding("warning", "blank", sentence, single(np.flatnonzero(blank)), (), {"films": count})
    if tiny.any():
        rows = np.flatnonzero(tiny)
        sizes = tuple(f"{measured['width'].iloc[row]} x {measured['height'].iloc[row]}" for row in rows)
        sentence = (
            f"{films_in_words(len(rows))} {_have(tiny)} a side shorter than {TINY} pixels: no film is that small."
        )
        yield Finding("warning", "tiny", sentence, single(rows), sizes, {"films": len(rows)})
    if colour.any():
        sentence = f"{films_in_words(int(colour.sum()))} {_have(colour)} colours: a photo or a screenshot of a film?"
        yield Finding("warning", "coloured", sentence, single(np.flatnonzero(colour)), (), {"films": int(colour.sum())})


def _have(which: pd.Series) -> str:
    return "has" if int(which.sum()) == 1 else "have"


def check_polarity(polarity: Polarity) -> Iterator[Finding]:
    """Suspected negatives, and films that are unlike all others."""
    known = int(np.isfinite(polarity.agreement).sum())
    suspects, unlike = polarity.suspects, polarity.unlike
    if len(suspects):
        share = len(suspects) / known
        most = share >= _MOSTLY_NEGATIVE
        judged = "anatomy (lungs darker than spine)" if polarity.judged_by_anatomy else "the majority of films"
        what = "so black and white are not used in one sense" if most else f"look at {it_or_them(len(suspects))}"
        percent = f" ({share:.0%})" if share >= 0.01 else ""
        like = "looks like a negative" if len(suspects) == 1 else "look like negatives"
        sentence = f"{films_in_words(len(suspects))} of {known:,}{percent} {like}, judged by {judged}; {what}."
        yield Finding(
            "error" if most else "warning",
            "polarity",
            sentence,
            single(suspects),
            tuple(f"agreement {polarity.agreement[row]:+.2f}" for row in suspects),
            {"films": len(suspects), "share": share, "anatomy": polarity.anatomy},
        )
    if len(unlike):
        sentence = (
            f"{films_in_words(len(unlike))} {'is' if len(unlike) == 1 else 'are'} unlike the typical film of this set: "
            "lying on the side, collimated to a part, or not a chest."
        )
        notes = tuple(f"agreement {polarity.agreement[row]:+.2f}" for row in unlike)
        yield Finding("notice", "unlike", sentence, single(unlike), notes, {"films": len(unlike)})
