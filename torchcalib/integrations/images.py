"""Log matplotlib figures as images with Lightning loggers."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from numpy.typing import NDArray

_DPI = 120


def log_picture(logger: Any, name: str, ax: Axes, step: int) -> bool:
    """Log the figure of `ax` as an image. Return False if the logger does not accept images.

    The first available method of the logger or of its `experiment` is called:

    - `logger.log_image(key, images, step)`: Weights & Biases.
    - `experiment.add_image(tag, array, step, dataformats)`: TensorBoard.
    - `experiment.log_figure(run_id, figure, path)`: MLflow; without a run `(figure_name, figure, step)`: Comet.
    """
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[as_array(ax)], step=step)
        return True
    experiment: Any = getattr(logger, "experiment", None)
    figure = ax.figure.canvas.figure
    if hasattr(experiment, "add_image"):
        experiment.add_image(name, as_array(ax), step, dataformats="HWC")
    elif hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):
        experiment.log_figure(logger.run_id, figure, f"{name}_{step:08d}.png")
    elif hasattr(experiment, "log_figure"):
        experiment.log_figure(figure_name=name, figure=figure, step=step)
    else:
        return False
    return True


def as_array(ax: Axes) -> NDArray[np.uint8]:
    """Render the figure of `ax` as an RGB image, uint8 `(height, width, 3)`, without pyplot."""
    figure = ax.figure.canvas.figure
    figure.set_dpi(_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
