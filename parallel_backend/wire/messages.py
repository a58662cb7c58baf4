"""All messages that cross processes, imported from the modules that define them by topic.

A message is a frozen dataclass of numbers, strings, tuples, dicts and tensors (encoding.py). Integers are never below 0.
Floats are finite. Tensors arrive on the CPU. The messages that ranks send, and no others, have a field `rank`.
"""

from parallel_backend.core.spans import Span

from .diagnosis import PROBE_COLUMNS as PROBE_COLUMNS
from .diagnosis import PROBE_TEXT as PROBE_TEXT
from .diagnosis import (
    BeginTimeline,
    DeviceMemoryReport,
    FindNotFinite,
    LinksProbed,
    NotFiniteFound,
    Probe,
    Probed,
    ProbeLinks,
    ReadMemory,
    ReadTimeline,
    ReleaseUnused,
    Timeline,
    UnusedReleased,
)
from .encoding import BadMessage as BadMessage
from .encoding import Encoding
from .encoding import Envelope as Envelope
from .lifecycle import IDLE as IDLE
from .lifecycle import START_UP as START_UP
from .lifecycle import Failure, HeartbeatMessage, Ready, Stop, Unload, Unloaded
from .loading import (
    Adapt,
    Adapted,
    AdaptersSent,
    DropAdapters,
    Load,
    Loaded,
    Loading,
    Rescale,
    Residency,
    SetResident,
    Weigh,
)
from .sampling import CloseRun, DropConditioning, OpenRun, Output, PutConditioning, RunStats, Step
from .shared_memory import DropSegment, OpenSegment
from .vae import BeginVAE, DropVAE, EndVAE, PutVAE, RunVAE, VAEBegun, VAEOutput

_TYPES = {
    cls.__name__: cls
    for cls in (
        *(Ready, HeartbeatMessage, Unload, Unloaded, Failure, Stop, Span),
        *(Load, Loading, Loaded, PutConditioning, DropConditioning),
        *(DropAdapters, Adapt, Rescale, Weigh, AdaptersSent, Adapted, SetResident, Residency),
        *(PutVAE, BeginVAE, VAEBegun, RunVAE, VAEOutput, EndVAE, DropVAE),
        *(Step, Output, OpenRun, CloseRun, RunStats, Probe, Probed, ProbeLinks, LinksProbed),
        *(BeginTimeline, ReadTimeline, Timeline, OpenSegment, DropSegment),
        *(ReadMemory, DeviceMemoryReport, ReleaseUnused, UnusedReleased, FindNotFinite, NotFiniteFound),
    )
}
_ENCODING = Encoding(_TYPES.values())
encode, decode_header = _ENCODING.encode, _ENCODING.decode
