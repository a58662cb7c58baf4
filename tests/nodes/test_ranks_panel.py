"""What the server tells open panels of the ranks: once a change, and nothing when all are closed."""

import asyncio
from types import SimpleNamespace

import pytest


@pytest.fixture
def panels(module, monkeypatch):
    panel = module("ranks_panel")
    monkeypatch.setattr(panel, "SECONDS", 0.01)
    sent, state = [], {"pools": []}
    monkeypatch.setattr(panel, "shown", lambda: dict(state))
    server = SimpleNamespace(
        sockets={"a": 1, "b": 2}, send_sync=lambda event, data, client: sent.append((event, data, client))
    )
    return panel.OpenPanels(server), server, sent, state


def test_each_open_panel_is_told_at_once_and_then_of_changes_alone(panels):
    open_panels, _, sent, state = panels

    async def run():
        open_panels.open("a")
        await asyncio.sleep(0.1)
        assert [client for *_, client in sent] == ["a"]
        open_panels.open("b")
        await asyncio.sleep(0.1)
        assert [client for *_, client in sent] == ["a", "b"]
        state["pools"] = [1]
        await asyncio.sleep(0.1)
        assert sorted(client for *_, client in sent[2:]) == ["a", "b"]
        assert {event for event, *_ in sent} == {"parallel_dit.ranks"}
        open_panels.open("a")  # as after the page has been connected anew
        await asyncio.sleep(0.1)
        assert [client for *_, client in sent[4:]] == ["a"]

    asyncio.run(run())
