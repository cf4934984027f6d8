"""TensorBoard's files of a run: its scalars, its config as text, its row in the table of hyperparameters."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_training.runtime.log_file import LogFile


def open_events(directory: Path) -> EventFile | TorchEventFile:
    try:
        return EventFile(directory)
    except ImportError:
        return TorchEventFile(directory)


class TorchEventFile:
    """A TensorBoard event file by torch's public writer, which needs a thread and a slow import."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))  # type: ignore[no-untyped-call]

    def describe(self, name: str, config: Mapping[str, Any]) -> None:
        """Write the config as text and as hyperparameters."""
        for summary in descriptions(name, config):
            self._writer.file_writer.add_summary(summary)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class EventFile:
    """A TensorBoard event file by TensorBoard's own RecordWriter; ImportError if this TensorBoard does not have it.

    EventFileWriter would need a thread and, if TensorFlow is installed, seconds of import.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node() or 'localhost'}.{os.getpid()}"
        self._file = LogFile(directory / name, "xb")
        self._records = RecordWriter(self._file)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def describe(self, name: str, config: Mapping[str, Any]) -> None:
        """Write the config as text and as hyperparameters."""
        for summary in descriptions(name, config):
            self._add(self._event(wall_time=time.time(), summary=summary))
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=entries)))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def descriptions(name: str, config: Mapping[str, Any]) -> list[Any]:
    """Summaries for TensorBoard's tabs Text and HParams. `name`: what the run is called there."""
    return [text_summary("config", f"# {name}\n\n```yaml\n{yaml_text(config)}```"), hparams_summary(name, config)]


def yaml_text(config: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(config), sort_keys=False)
    return text


def text_summary(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])


def hparams_summary(name: str, config: Mapping[str, Any]) -> Any:
    """The start of a session, from which the tab HParams makes the run's row, with all its scalars."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    start = SessionStartInfo(group_name=name, start_time_secs=time.time())
    for key, value in flat(config).items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        elif value is not None:
            start.hparams[key].string_value = value if isinstance(value, str) else json.dumps(value, default=str)
    content = HParamsPluginData(session_start_info=start, version=metadata.PLUGIN_DATA_VERSION)
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString())
    tag, tensor = metadata.SESSION_START_INFO_TAG, metadata.NULL_TENSOR
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)])


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys and values of nested mappings, `algo_kwargs.clip_coef`; a schedule stays one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and "kind" not in value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
