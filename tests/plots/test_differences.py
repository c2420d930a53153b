"""The picture of differences between systems: their values in words and marks, and names that are cut."""

from helpers.systems import FEW, systems
from matplotlib.figure import Figure

import torchcalib as tc
from torchcalib.plots import difference_plot, to_svg


def test_picture_is_drawn_on_the_axes_given_and_cuts_long_names():
    logits, target = systems("binary", 60)
    logits["a name that is longer than anybody would like <b> $x_2$"] = logits.pop("noisy")
    compared = tc.compare(logits, target, task="binary", from_logits=True, **FEW)
    given = Figure().subplots()
    assert difference_plot(compared, given, title="mine") is given
    panels = given.child_axes
    titles = [panel.get_title(loc="left") for panel in panels]
    assert titles[:2] == ["Accuracy (share of samples)", "NLL (nats)"]
    assert "|ECD| (nats)" in titles
    assert "RMSCE debiased" not in titles, "it has no interval"
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["sure", "a name that is longer than …"]
    svg = to_svg(difference_plot(compared))
    assert svg == to_svg(difference_plot(compared))
    assert "<b>" not in svg
