"""What a rank that is alone meets the others by: nobody."""

from datetime import timedelta

from parallel_backend.rank.comm.guard import Guard
from parallel_backend.rank.comm.peers import Peers
from parallel_backend.rank.comm.rendezvous import Rendezvous
from parallel_backend.wire.heartbeat import Heartbeat
from parallel_backend.wire.rank_settings import RankSettings


def nobody() -> Peers:
    """The peers of a CPU rank that has none."""
    settings = RankSettings(("cpu",), 1, timedelta(1), rank=0, rendezvous=("", 0))
    rendezvous = Rendezvous(settings.rendezvous, 1, settings.timeout)

    def end(error: BaseException) -> None:
        raise error

    return Peers(settings, rendezvous, Guard(Heartbeat(), rendezvous.check, end))
