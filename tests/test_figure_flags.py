"""--figure_format and --figure_width decide how figures are written, and no number."""

import pytest

from tests.inside import call, text

FEW = {"corpus": text(), "num_fit": 80, "num_eval": 31, "seed": 2}


@pytest.mark.slow
def test_figures_have_the_format_and_width_of_the_flags():
    outcome = call("r2", **FEW, figure_format="svg", figure_width="column")
    assert {path.name for path in outcome.out.glob("r2.*")} == {"r2.svg"}
    (figure,) = outcome.figures
    assert figure.get_figwidth() == 3.25
    assert "r2.svg" in outcome.printed
    # they change no number
    assert not [name for name in outcome.results["config"] if name.startswith("figure")]


@pytest.mark.parametrize("width", ["wide", "0.1", "nan"])
def test_a_width_that_figures_cannot_have_is_refused(width):
    with pytest.raises(ValueError, match=r"expected column, page, or inches from 2 to 40"):
        call("r2", **FEW, figure_width=width)
