"""Labels of CheXpert's kind: what counts as present, absent, unknown and normal."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from afire.data.film import view_names
from afire.data.sources.table import ages, normal_from, raw_findings, sexes, with_policy
from afire.errors import UserError


def test_values() -> None:
    raw = raw_findings(pd.DataFrame({"A": ["1.0", "0.0", "-1.0", "", "1"]}), ["A"], "t.csv")
    assert raw["A"].tolist()[:3] == [1, 0, -1] and math.isnan(raw["A"][3]) and raw["A"][4] == 1
    with pytest.raises(UserError, match=r"t.csv: column 'A' holds '2' in row 2; expected 1, 0, -1"):
        raw_findings(pd.DataFrame({"A": ["1", "2"]}), ["A"], "t.csv")
    with pytest.raises(UserError, match="holds 'yes'"):
        raw_findings(pd.DataFrame({"A": ["yes"]}), ["A"], "t.csv")


@pytest.mark.parametrize(("uncertain", "u"), [("ones", 1.0), ("zeros", 0.0), ("ignore", math.nan)])
@pytest.mark.parametrize(("blank", "b"), [("zeros", 0.0), ("ignore", math.nan)])
def test_policies(uncertain, u: float, blank, b: float) -> None:
    raw = pd.DataFrame({"A": [1.0, 0.0, -1.0, math.nan]})
    decided = with_policy(raw, uncertain, blank)
    assert decided.columns.tolist() == ["label:A"]
    for found, expected in zip(decided["label:A"], [1.0, 0.0, u, b], strict=True):
        assert found == expected or (math.isnan(found) and math.isnan(expected))


N = math.nan


@pytest.mark.parametrize(
    ("no_finding", "disease", "devices", "strict", "lenient"),
    [
        (1, N, N, 1, 1),
        (1, 0, 1, 1, 1),
        (1, 0, -1, 1, 1),
        (1, -1, N, N, 1),  # doubtful: not normal for CheXpert; the paper's binary labels do not see it
        (1, 1, N, 0, 0),
        (N, 1, N, 0, 0),
        (0, 1, 1, 0, 0),
        (N, -1, N, N, N),
        (N, N, N, N, N),  # nothing mentioned: row 3 of the paper's table; nobody called it normal
        (N, N, 1, N, N),
        (0, 0, 0, N, N),
    ],
)
def test_normal(no_finding: float, disease: float, devices: float, strict: float, lenient: float) -> None:
    raw = pd.DataFrame({"No Finding": [no_finding], "Edema": [disease], "Support Devices": [devices]})
    for uncertain_is_disease, expected in ((True, strict), (False, lenient)):
        found = normal_from(raw, uncertain_is_disease).iloc[0]
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_spellings() -> None:
    assert view_names(pd.Series([" pa", "AP", "LL", "rl", "Lateral", "", "AP AXIAL"])).tolist() == [
        "PA", "AP", "LATERAL", "LATERAL", "LATERAL", "", "OTHER",
    ]  # fmt: skip
    assert sexes(pd.Series(["Male", "F", "Unknown", "", "m"])).tolist() == ["M", "F", "", "", "M"]
    years = ages(pd.Series(["57", "058Y", "411", "0", "", "13M", "90"])).tolist()
    assert [year for year in years if not math.isnan(year)] == [57, 58, 90]
