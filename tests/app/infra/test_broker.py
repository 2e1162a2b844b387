"""Wake-ups over Redis: heard by those who listen, and free of cost while nothing happens."""

import asyncio

import redis

from app.config import Settings
from app.infra.broker import Broker


def commands_of_listeners(settings: Settings) -> list[int]:
    """How many commands each connection that listens on this Redis database has sent so far."""
    number = (settings.redis_url or "").rpartition("=")[2]
    with redis.Redis.from_url(settings.redis_url or "") as client:
        return [
            int(listed["tot-cmds"])
            for listed in client.client_list(_type="pubsub")
            if listed["db"] == number and listed["cmd"] != "client|list"
        ]


async def test_a_listener_hears_each_wake_up_and_asks_redis_for_nothing_in_between(settings: Settings) -> None:
    queue = Broker(settings)
    heard = asyncio.Event()
    await queue.start()
    try:
        await queue.add_listener("run_x", heard.set)
        await asyncio.wait_for(heard.wait(), 30)  # told to look once when its connection is there
        heard.clear()
        await queue.wake_streams("run_x")
        await asyncio.wait_for(heard.wait(), 30)
        before = commands_of_listeners(settings)
        for _ in range(50):
            heard.clear()
            await queue.wake_streams("run_x")
            await asyncio.wait_for(heard.wait(), 30)
        assert len(before) == 1
        assert commands_of_listeners(settings) == before
    finally:
        await queue.close()
