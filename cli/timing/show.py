"""`batchdecode profiles`: step times, listed or one by one, with what their hardware allows."""

import sys

import msgspec

from batcher.timing.loading import step_time_of
from batcher.timing.profiles import is_file, load_profile, read_profiles, shipped_profiles

from ..running.output import stdout_sink
from .report import (
    StepTimeReport,
    predictions_of,
    report_of_profile,
    report_of_roofline,
)
from .tables import details_of, table_of


def show_step_times(name: str | None, *, as_json: bool) -> None:
    """Carry out `batchdecode profiles`.

    Raises:
        BatchdecodeError: there is no such profile, or its file cannot be used.
        WriteError: stdout takes no more.
    """
    reports = _reports(name)
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(reports)).decode() + "\n"
    elif name is not None and len(reports) == 1:
        text = details_of(reports[0])
    else:
        text = table_of(reports)
    stdout_sink().write(text.encode(sys.stdout.encoding, "backslashreplace"))


def _reports(name: str | None) -> list[StepTimeReport]:
    if name is None:
        return [report_of_profile(*named) for named in shipped_profiles().items()]
    if name.startswith("roofline:"):
        return [report_of_roofline(name)]
    if name.partition(":")[0] == "constant":
        step_time = step_time_of(name)
        return [
            StepTimeReport(
                name=name,
                settings=step_time.settings,
                predictions=predictions_of(step_time),
            )
        ]
    if is_file(name):
        return [report_of_profile(*named) for named in read_profiles(name).items()]
    return [report_of_profile(*load_profile(name))]
