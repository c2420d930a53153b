"""Pictures to whatever keeps a training's log, told by what it offers."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from numpy.typing import NDArray

_DPI = 120


def log_picture(logger: Any, name: str, ax: Axes, step: int) -> bool:
    """Give the figure that `ax` is on to a logger, if it takes pictures.

    - `logger.log_image(key, images, step)`: Weights & Biases and what follows it.
    - `experiment.add_image(tag, array, step, dataformats)`: TensorBoard's writer and what follows it.
    - `experiment.log_figure(run_id, figure, path)`: MLflow; without a run, `(figure_name, figure, step)`: Comet.

    Args:
        logger: of Lightning; what it writes with is `logger.experiment`.
        name: of the picture, the same for every step.
        ax: on the figure.
        step: of the training.

    Returns:
        Whether the logger takes pictures.
    """
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[as_array(ax)], step=step)
        return True
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_image"):
        experiment.add_image(name, as_array(ax), step, dataformats="HWC")
        return True
    if hasattr(experiment, "log_figure"):
        figure = ax.figure.canvas.figure
        if hasattr(logger, "run_id"):
            experiment.log_figure(logger.run_id, figure, f"{name}_{step:08d}.png")
        else:
            experiment.log_figure(figure_name=name, figure=figure, step=step)
        return True
    return False


def as_array(ax: Axes) -> NDArray[np.uint8]:
    """Return the figure that `ax` is on as pixels `(height, width, 3)`, drawn without pyplot."""
    figure = ax.figure.canvas.figure
    figure.set_dpi(_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
