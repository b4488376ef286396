"""A Service over a real fleet: what it may be asked, how its text reads, and a client of its coordinator.

Knows configurations, model folders and the fleet's handle. Does not know HTTP or scripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from distspec.config import Config, Server
from distspec.constraints.trial import Trials
from distspec.errors import FleetError, InvalidValue, Unavailable
from distspec.models import DRAFT_FIELD, ModelConfig, load_tokenizer, model_folder, same_vocabulary
from distspec.serving.limits import Limits
from distspec.serving.prometheus import exposition
from distspec.serving.service import Service
from distspec.serving.text import Text
from distspec.workers import fleet
from distspec.workers.fleet import FleetHandle


@dataclass(frozen=True, slots=True)
class Connection:
    """A service, and what else the endpoints tell about its fleet."""

    service: Service
    handle: FleetHandle

    async def health(self) -> str | None:
        """None when requests can be served, else why not."""
        try:
            status = await self.handle.status()
        except FleetError as error:
            return str(error)
        if any(worker["role"] == "decode" for worker in status["workers"].values()):
            return None
        return "no decode worker is up"

    async def metrics(self) -> str:
        """Prometheus text. Raises Unavailable while there is no coordinator."""
        try:
            return exposition(await self.handle.metrics())
        except FleetError as error:
            raise Unavailable(str(error)) from None


@asynccontextmanager
async def connection(config: Config) -> AsyncIterator[Connection]:
    """Join the fleet of this configuration, launching it if there is none, for as long as the context lasts.

    Ray must be initialised. A fleet that nobody else holds ends when its lease lapses. Raises ConfigError,
    ModelNotFound or FleetError.
    """
    async with AsyncExitStack() as stack:
        reading = asyncio.create_task(asyncio.to_thread(read_model, config))
        stack.push_async_callback(lambda: asyncio.gather(reading, return_exceptions=True))
        handle = await asyncio.to_thread(launch, config)
        # Stopping the lease's keeper waits for a beat of it.
        stack.push_async_callback(asyncio.to_thread, handle.close)
        text, limits = await reading
        client = handle.client()
        await client.start()
        stack.push_async_callback(client.close)
        trials = Trials(model_folder(config.model.name), limits.vocab_size, text.stop_ids)
        stack.push_async_callback(asyncio.to_thread, trials.close)
        yield Connection(Service(client, text, limits, trials), handle)


def launch(config: Config) -> FleetHandle:
    """`workers.fleet.launch`, where servers that differ in host, port or defaults share a fleet.

    What the models cannot do is refused before any actor starts.
    """
    check_models(config)
    return fleet.launch(replace(config, server=Server()))


def check_models(config: Config) -> None:
    """Refuse what the models that a configuration names cannot do; fetches them where need be.

    Raises ModelNotFound or ConfigError.
    """
    target = model_folder(config.model.name)
    asked, own = config.model.max_model_len, ModelConfig.from_pretrained(target).max_position
    if asked is not None and asked > own:
        raise InvalidValue("model.max_model_len", asked, f"at most {own}, the model's own")
    if config.speculation.drafter == "standalone" and config.speculation.draft_model is not None:
        same_vocabulary(target, model_folder(config.speculation.draft_model, DRAFT_FIELD))


def read_model(config: Config) -> tuple[Text, Limits]:
    """Tokenizer and limits of the model that a configuration names; fetches it where need be.

    Raises ModelNotFound or ConfigError.
    """
    name = config.model.name
    shape = ModelConfig.from_pretrained(model_folder(name))
    limits = Limits(
        model=config.served_name,
        vocab_size=shape.vocab_size,
        max_model_len=config.max_model_len(shape.max_position),
        default_max_tokens=config.server.default_max_tokens,
        max_n=config.server.max_n,
        max_streams=max(config.coordinator.max_queued_requests, config.server.max_n),
        max_nodes=config.engine.max_scratch_nodes,
        policies=config.policies,
        tool_call_parser=config.server.tool_call_parser,
    )
    return Text(load_tokenizer(name), shape.eos_token_ids), limits
