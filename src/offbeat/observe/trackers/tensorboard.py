"""Event files for TensorBoard, written with the ``tensorboard`` package alone.

Owns the layout: one scalar per metric, the configuration as text and as the run's hyperparameters,
the end status as that of the hyperparameter session.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from offbeat.config import RunConfig, to_yaml
from offbeat.config.stats_logger import TensorBoardConfig
from offbeat.observe.summary import RunStatus
from offbeat.observe.trackers.hyperparameters import Value, flat


class TensorBoardTracker:
    """A ``Tracker``. Each step is flushed, so that an open TensorBoard shows it."""

    def __init__(self, cfg: RunConfig, section: TensorBoardConfig, run_dir: Path) -> None:
        folder = run_dir / "tensorboard"
        if section.path is not None:
            folder = Path(section.path) / cfg.experiment_name / run_dir.name
        self._writer = EventFileWriter(str(folder))
        self._begun = False
        self._add(_text("config", f"```yaml\n{to_yaml(cfg)}\n```"))
        self._add(_session_start(run_dir.name, flat(cfg)))
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Tracker``. What an earlier attempt wrote from here on is not shown any more."""
        if not self._begun:
            self._begun = True
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Summary(value=scalars), step)
        self._writer.flush()

    def finish(self, status: str, error: str | None) -> None:
        """See ``Tracker``."""
        self._add(_text("status", status if error is None else f"{status}: {error}"))
        self._add(_session_end(status))
        self._writer.close()

    def _add(self, summary: Summary, step: int = 0) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _text(tag: str, text: str) -> Summary:
    about = text_metadata.create_summary_metadata(display_name=None, description=None)
    tensor = tensor_util.make_tensor_proto([text.encode()])
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)])


def _session_start(name: str, values: Mapping[str, Value]) -> Summary:
    start = SessionStartInfo(start_time_secs=time.time(), group_name=name)
    for key, value in values.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = value
    data = HParamsPluginData(session_start_info=start)
    return _hparams(metadata.SESSION_START_INFO_TAG, data)


def _session_end(status: str) -> Summary:
    well = status == RunStatus.COMPLETED
    code = api_pb2.STATUS_SUCCESS if well else api_pb2.STATUS_FAILURE
    end = SessionEndInfo(status=code, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))


def _hparams(tag: str, data: HParamsPluginData) -> Summary:
    about = metadata.create_summary_metadata(data)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])
