"""Videos of episodes, as MP4 or GIF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.config import Task
from rl_training.envs.episodes import Envs
from rl_training.envs.filming import film, filmed_kwargs, frames_per_second
from rl_training.errors import InputError, MissingPackage
from rl_training.runtime.atomic_files import temporary_beside
from rl_training.types import Array

PACKAGES = {".mp4": ("imageio", "imageio_ffmpeg"), ".gif": ("imageio",)}
FASTEST = 1000  # frames per second
FASTEST_GIF = 50.0  # frames per second: browsers slow down what is faster


class Video:
    """A file that grows by an image for each step of the first environment, until `end`."""

    def __init__(self, path: Path, env_kwargs: dict[str, Any], fps: float | None) -> None:
        self.path, self.env_kwargs, self.fps = path, env_kwargs, fps or 0.0
        self.frames = 0
        self._writer: Any = None
        self._every = 1
        self._end: Callable[[], None] = lambda: None

    def begin(self, envs: Envs) -> None:
        """To be called before the first reset of the environments."""
        self.fps = self.fps or frames_per_second(envs, self.env_kwargs)
        self._end = film(envs, self.show)

    def end(self) -> None:
        """Further steps are not shown."""
        self._end()

    def show(self, image: Array) -> None:
        writer = self._writer or self._open()
        if self.frames % self._every == 0:
            writer.append_data(even(image))
        self.frames += 1

    def _open(self) -> Any:
        import imageio.v2 as imageio

        if self.path.suffix == ".gif":
            self._every = max(1, round(self.fps / FASTEST_GIF))
            self._writer = imageio.get_writer(self.path, mode="I", duration=1000 * self._every / self.fps, loop=0)
        else:
            # macro_block_size 2: the default of 16 would resize images.
            options: dict[str, Any] = {"macro_block_size": 2, "ffmpeg_log_level": "error"}
            self._writer = imageio.get_writer(self.path, format="FFMPEG", mode="I", fps=self.fps, **options)  # type: ignore[arg-type]
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def even(image: Array) -> Array:
    """With the last row and column repeated where their number is odd, which MP4 cannot express."""
    height, width = image.shape[:2]
    return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge") if (height | width) % 2 else image


@contextmanager
def recording(path: str | Path, task: Task, fps: float | None = None) -> Iterator[Video]:
    """A video of the evaluation of a task. The file is there when the context ends without an error, not before."""
    target = check_target(Path(path))
    if fps is not None and not 0 < fps <= FASTEST:
        raise InputError(f"fps should be more than 0 and at most {FASTEST}, got {fps:g}")
    kwargs = filmed_kwargs(task.env_id, task.eval_env_kwargs)
    with temporary_beside(target) as temporary:
        video = Video(temporary, kwargs, fps)
        try:
            yield video
        finally:
            video.close()


def check_target(path: Path) -> Path:
    """Raise an InputError, before anything is played, where a video of this name cannot be written."""
    packages = PACKAGES.get(path.suffix)
    if packages is None:
        raise InputError(f"{path}: a video is an .mp4 or a .gif file")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the file for the video")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingPackage(f'a video needs {" and ".join(missing)}: pip install "rl-training[video]"')
    return path
