"""What the server tells open panels of the ranks: once a change, and nothing when all are closed."""

import asyncio
import threading
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


@pytest.fixture
def unloading(module, monkeypatch):
    """(Unloading, its registry, the prompts that run)"""
    panel = module("ranks_panel")
    monkeypatch.setattr(panel, "SECONDS", 0.01)
    ranks, running = SimpleNamespace(unload_asked=False, unloaded=0, may=threading.Event()), []
    ranks.may.set()

    def unload(prompt_runs):
        assert ranks.may.wait(30)
        if ranks.unload_asked and not prompt_runs():
            ranks.unload_asked, ranks.unloaded = False, ranks.unloaded + 1

    ranks.unload_between_prompts = unload
    monkeypatch.setattr(panel, "registry", lambda: ranks)
    return panel.Unloading(SimpleNamespace(get_current_queue_volatile=lambda: (running, []))), ranks, running


def test_unload_waits_for_the_prompts_end_and_is_done_once(unloading):
    panel, ranks, running = unloading

    async def run():
        assert await panel.asked()
        running.append("prompt")
        assert [await panel.asked() for _ in range(8)] == [False] * 8
        await asyncio.sleep(0.1)
        assert ranks.unloaded == 1
        running.clear()
        while ranks.unload_asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert (ranks.unloaded, len(asyncio.all_tasks())) == (2, 1)

    asyncio.run(run())
