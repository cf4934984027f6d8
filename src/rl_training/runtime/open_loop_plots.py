"""Drawings of open-loop predictions: a PNG with chosen steps and whole curves, a GIF of all steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_training.data.batch import arrays_of
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.atomic_files import temporary_beside, write_atomic
from rl_training.runtime.open_loop import OpenLoop
from rl_training.runtime.video import FASTEST_GIF, Video
from rl_training.runtime.video import check_target as check_video
from rl_training.types import Array

MOST_CURVES = 24  # numbers of observations that are drawn
COLUMNS = 10  # images in a row of the PNG
GAP = 2  # pixels between two images
SMALLEST = 48  # pixels of the longer side of an image in the PNG
WIDTH = 12.0  # of the PNG in inches
GIF_WIDTH = 9.0
HEADING = 0.3
TRUE, PREDICTED, SEEN = "#222222", "#1f6fb2", "#e9edf1"
Write = Callable[[OpenLoop, Path], None]


class PredictedCurve(NamedTuple):
    """A number over time."""

    name: str
    true: Array  # [T]
    predicted: Array  # [S, T]


def check_targets(png: str | Path | None, gif: str | Path | None, fps: float) -> list[tuple[Path, Write]]:
    """The files to write with the functions that write them. An InputError, before anything is played, where one
    cannot be written."""
    given = [(name, Path(path)) for name, path in (("png", png), ("gif", gif)) if path is not None]
    for name, path in given:
        if path.suffix != f".{name}":
            raise InputError(f"{path}: --{name} writes a .{name} file")
        if path.is_dir():
            raise InputError(f"{path} is a folder: give the file to write")
        if find_spec("matplotlib") is None:
            raise MissingPackage(f'--{name} needs matplotlib: pip install "rl-training[plot]"')
    if gif is not None:
        check_video(Path(gif))
        if not 0 < fps <= FASTEST_GIF:
            raise InputError(f"fps should be more than 0 and at most {FASTEST_GIF:g}, got {fps:g}")
    writers: dict[str, Write] = {"png": write_png, "gif": lambda dream, path: write_gif(dream, path, fps)}
    return [(path, writers[name]) for name, path in given]


def write_png(dream: OpenLoop, path: Path) -> None:
    images, curves = images_of(dream), curves_of(dream)
    strips = {key: strip(dream, *pair) for key, pair in images.items()}
    heights = [0.94 * WIDTH * image.shape[0] / image.shape[1] + HEADING for image in strips.values()]
    figure, tops, panels = layout(WIDTH, heights, 1, curves)
    title(figure, dream)
    for (key, image), axes in zip(strips.items(), tops, strict=True):
        draw_strip(axes, dream, images[key][0].shape[1:3], image, key)
    for curve, axes in zip(curves, panels, strict=True):
        draw_curve(axes, dream, curve)
    try:
        write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=150))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def write_gif(dream: OpenLoop, path: Path, fps: float) -> None:
    """An image for each step: observations beside their predictions, and curves that grow."""
    with temporary_beside(path) as temporary:
        video = Video(temporary, {}, fps)
        try:
            for frame in animation(dream):
                video.show(frame)
        finally:
            video.close()


def animation(dream: OpenLoop) -> Iterator[Array]:
    """[H, W, 3] bytes for each step."""
    images, curves = images_of(dream), curves_of(dream)
    names = [f"{key} {what}".strip() for key in images for what in ("true", "predicted", "error")]
    films = [film for pair in images.values() for film in (*pair, error_image(*pair))]
    heights = [GIF_WIDTH / 3 * true.shape[1] / true.shape[2] + HEADING for true, _ in images.values()]
    figure, tops, panels = layout(GIF_WIDTH, heights, 3, curves)
    text = title(figure, dream)
    shown = [draw_image(axes, film[0], name) for axes, film, name in zip(tops, films, names, strict=True)]
    lines = [line for curve, axes in zip(curves, panels, strict=True) for line in draw_curve(axes, dream, curve)]
    data = [line.get_data() for line in lines]
    text.set_text(caption(dream, 0))  # so that the layout has room for it
    for artist in (text, *shown, *lines):
        artist.set_animated(True)
    figure.canvas.draw()
    still = figure.canvas.copy_from_bbox(figure.bbox)  # what does not move is drawn once
    for t in range(len(dream.true.reward)):
        text.set_text(caption(dream, t))
        for artist, film in zip(shown, films, strict=True):
            artist.set_data(film[t])
        for line, (x, y) in zip(lines, data, strict=True):
            line.set_data(x[: t + 1], y[: t + 1])
        figure.canvas.restore_region(still)
        for artist in (text, *shown, *lines):
            figure.draw_artist(artist)
        yield np.array(figure.canvas.buffer_rgba())[..., :3]


def caption(dream: OpenLoop, t: int) -> str:
    return f"{text_of(dream)}\nobservation {t + 1}: {'seen' if t < dream.context else 'imagined'}"


def images_of(dream: OpenLoop) -> dict[str, tuple[Array, Array]]:
    """(true, predicted) images [T, H, W, 3] by key. Of several samples, the first."""
    predicted = arrays_of(dream.predicted.obs)
    images = {key: part for key, part in arrays_of(dream.true.obs).items() if is_images(part)}
    return {key: (enlarged(as_rgb(true)), enlarged(as_rgb(predicted[key][0]))) for key, true in images.items()}


def enlarged(images: Array) -> Array:
    """Images [T, H, W, 3] with every pixel repeated until the gaps between them are narrow."""
    times = -(-SMALLEST // max(images.shape[1:3]))
    return images.repeat(times, 1).repeat(times, 2)


def is_images(part: Array) -> bool:
    """part [T, *shape]"""
    return part.dtype == np.uint8 and part.ndim in (3, 4, 5)


def as_rgb(images: Array) -> Array:
    """Images [T, *shape] as [T, H, W, 3]: the last of a stack, and the last channel where there are not 1 or 3."""
    if images.ndim == 5:
        images = images[:, -1]
    if images.ndim == 3:
        images = images[..., None]
    elif images.shape[-1] >= images.shape[1]:  # channels first
        images = np.moveaxis(images, 1, -1)
    return images if images.shape[-1] == 3 else np.repeat(images[..., -1:], 3, -1)


def error_image(true: Array, predicted: Array) -> Array:
    """Grey where the prediction is right."""
    error: Array = (predicted.astype(np.int16) - true + 255) // 2
    return error.astype(np.uint8)


def curves_of(dream: OpenLoop) -> list[PredictedCurve]:
    """The first numbers of the observation, then reward and continuation."""
    curves = number_curves(dream)[:MOST_CURVES]
    true, predicted = dream.true, dream.predicted
    curves.append(PredictedCurve("reward", true.reward, predicted.reward))
    return [*curves, PredictedCurve("probability that the episode goes on", true.continuation, predicted.continuation)]


def number_curves(dream: OpenLoop) -> list[PredictedCurve]:
    """Each number of the observation."""
    predicted, curves = arrays_of(dream.predicted.obs), []
    for key, part in arrays_of(dream.true.obs).items():
        if is_images(part):
            continue
        true, samples = part.reshape(len(part), -1), predicted[key].reshape(*predicted[key].shape[:2], -1)
        for i, index in enumerate(np.ndindex(part.shape[1:])):
            place = f"[{', '.join(map(str, index))}]" if index else ""
            curves.append(PredictedCurve(f"{key or 'observation'}{place}", true[:, i], samples[..., i]))
    return curves


def text_of(dream: OpenLoop) -> str:
    length, count = len(dream.true.reward), len(number_curves(dream))
    left_out = f"; the first {MOST_CURVES} of {count} numbers" if count > MOST_CURVES else ""
    return (
        f"{dream.env_id} after {dream.step:,} steps of training, observations: {dream.context} seen, "
        f"{length - dream.context} imagined{left_out}"
    )


def layout(width: float, heights: list[float], across: int, curves: list[PredictedCurve]) -> tuple[Any, Any, Any]:
    """(figure, axes of images, axes of curves)

    There are `across` axes in each row of images, whose heights are in inches, and rows of curves below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(curves), 3 if len(curves) <= 9 else 4)
    sizes = [*heights, *[1.7] * math.ceil(len(curves) / columns)]
    figure = Figure((width, sum(sizes) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    outer = figure.add_gridspec(len(heights) + 1, 1, height_ratios=[*heights, sum(sizes) - sum(heights)])
    rows = [outer[row].subgridspec(1, across) for row in range(len(heights))]
    below = outer[-1].subgridspec(len(sizes) - len(heights), columns)
    images = [figure.add_subplot(row[i]) for row in rows for i in range(across)]
    panels = [figure.add_subplot(below[i // columns, i % columns]) for i in range(len(curves))]
    for axes in panels[-columns:]:  # the lowest of each column
        axes.set_xlabel("observation", fontsize=9)
    return figure, images, panels


def title(figure: Any, dream: OpenLoop) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    samples = len(dream.predicted.reward)
    predicted = f"predicted: {samples} samples and their mean" if samples > 1 else "predicted"
    handles = [
        Line2D([], [], color=TRUE, label="true"),
        Line2D([], [], color=PREDICTED, label=predicted),
        Patch(color=SEEN, label="seen by the model"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure.suptitle(text_of(dream), fontsize=11)


def draw_curve(axes: Any, dream: OpenLoop, curve: PredictedCurve) -> list[Any]:
    """Returns the lines."""
    steps = np.arange(1, len(curve.true) + 1)
    edge = dream.context + 0.5
    axes.axvspan(0.5, edge, color=SEEN, zorder=0)
    axes.axvline(edge, color="#8a949e", linewidth=0.8, linestyle="--", zorder=1)
    lines = [axes.plot(steps, curve.true, color=TRUE, linewidth=1.6, zorder=3)[0]]
    alone = len(curve.predicted) == 1
    if not alone:
        lines += [axes.plot(steps, y, color=PREDICTED, linewidth=0.7, alpha=0.35, zorder=2)[0] for y in curve.predicted]
    lines += axes.plot(steps, curve.predicted.mean(0), color=PREDICTED, linewidth=1.5, zorder=4)
    axes.set_title(curve.name, fontsize=9, loc="left")
    axes.set_xlim(0.5, len(steps) + 0.5)
    axes.tick_params(labelsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if curve.predicted is dream.predicted.continuation:
        axes.set_ylim(-0.05, 1.05)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return lines


def draw_image(axes: Any, image: Array, name: str) -> Any:
    axes.set_axis_off()
    axes.set_title(name, fontsize=9)
    return axes.imshow(image, interpolation="nearest")


def chosen_steps(dream: OpenLoop) -> Array:
    """Of the steps that were seen the first and the last, and some of those imagined, the first and the last among
    them."""
    length = len(dream.true.reward)
    seen = np.unique([0, dream.context - 1])
    count = min(COLUMNS - len(seen), length - dream.context)
    return np.concatenate([seen, np.linspace(dream.context, length - 1, count).round().astype(int)])


def strip(dream: OpenLoop, true: Array, predicted: Array) -> Array:
    """[H, W, 3] Rows of the true, the predicted and the error images of the chosen steps."""
    chosen = chosen_steps(dream)
    rows = [film[chosen] for film in (true, predicted, error_image(true, predicted))]
    empty = COLUMNS - len(chosen)  # so that few images are not larger than many
    rows = [np.pad(row, ((0, empty), (0, GAP), (0, GAP), (0, 0)), constant_values=255) for row in rows]
    return np.concatenate([np.concatenate(list(row), 1) for row in rows])


def draw_strip(axes: Any, dream: OpenLoop, size: tuple[int, int], image: Array, key: str) -> None:
    height, width = (side + GAP for side in size)
    chosen = chosen_steps(dream)
    draw_image(axes, image, "")
    axes.set_axis_on()
    axes.set_title(key, fontsize=9, loc="left")
    axes.set_xticks((np.arange(len(chosen)) + 0.5) * width - 1.5, [str(t + 1) for t in chosen])
    axes.set_yticks((np.arange(3) + 0.5) * height - 1.5, ["true", "predicted", "error"])
    axes.tick_params(length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    seen = int((chosen < dream.context).sum())
    axes.axvline(seen * width - GAP / 2 - 0.5, color="#d9622b", linewidth=2)
