"""What sleep and wake do to a prefill engine's memory, hand-overs and texts, inside vLLM."""

import time
from dataclasses import replace
from typing import Any

from vllm_engines import EngineOptions, Remote, connector
from vllm_pairs import Save, Settings, begun, counted, prefilled


def sleepy_pair(model: str, options: EngineOptions, host_bytes: int) -> list[Remote]:
    """A prefill engine that may sleep, with host memory below its cache, and a decode engine."""
    sleepy = replace(options, more=options.more | {"enable_sleep_mode": True})
    return [
        Remote(5600, model, sleepy, connector("kvstow", host_bytes=host_bytes)),
        Remote(5700, model, options, connector("kvstow")),
    ]


def measure_sleep(engines: list[Remote], *, settings: Settings, save: Save) -> None:
    """A hand-over before and after: its text, its way, and the memory that was free meanwhile."""
    result: dict[str, Any] = {}
    prefill, decode = engines
    length = settings.first
    try:
        begun(engines)
        before, free = prefill.counts(), prefill.free_bytes()
        result["hand-over before"] = handed(prefill, decode, settings.prompts(length + 1))
        prompt = settings.prompts(length + 1)
        text = prefill.first({"prompt": prompt})["text"]
        until = time.perf_counter() + 10
        while not prefill.counts().get("stored_rows") and time.perf_counter() < until:
            prefill.first({"prompt": settings.prompts(64)})  # counters are told with steps
        result["rows stored before"] = prefill.counts().get("stored_rows", 0.0)
        result["sleep_s"] = prefill.sleep()
        result["gigabytes given back"] = round((prefill.free_bytes() - free) / 1e9, 2)
        result["wake_s"] = prefill.wake()
        for engine in engines:  # sleep resets caches, as for new weights
            engine.name_weights("as before")
        result["same text after"] = prefill.first({"prompt": prompt})["text"] == text
        result["hand-over after"] = handed(prefill, decode, settings.prompts(length + 1))
        result["counted"] = {
            name: value - before.get(name, 0.0)
            for name, value in prefill.counts().items()
            if value != before.get(name, 0.0)
        }
    except Exception as error:  # it is a result, too
        result["error"] = repr(error)[:500]
    finally:
        for engine in engines:
            engine.close()
    save("kvstow", result)


def handed(prefill: Remote, decode: Remote, prompt: list[int]) -> dict[str, Any]:
    """One hand-over: milliseconds to its first token, its way, whether its text is right."""
    before = decode.counts()
    done = decode.first(prefilled(prefill, [prompt])[0])
    right = prefill.first({"prompt": prompt})["text"]
    return {
        "first_ms": round(1000 * done["first"], 1),
        "text_is_right": done["text"] == right,
        **counted(before, decode.counts()),
    }
