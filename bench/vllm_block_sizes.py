"""Engines with different tokens per block, beside ones with equal blocks."""

from dataclasses import replace
from typing import Any

from vllm_engines import Remote, spread, use
from vllm_pairs import Save, Settings, begun, computed_apart, counted, prefilled

UNEQUAL, EQUAL = (16, 64), (16, 16)
WAYS: dict[str, tuple[tuple[int, int], dict[str, str]]] = {
    "as the agent chooses": (UNEQUAL, {}),
    "every byte compared": (UNEQUAL, {"digest": "always"}),
    "equal blocks": (EQUAL, {}),
}


def sized_pair(
    model: str, settings: Settings, transfer: dict[str, Any], sizes: tuple[int, int]
) -> list[Remote]:
    """Two engines with so many tokens per block that have not started."""
    return [
        Remote(5600 + 100 * i, model, replace(settings.options, block_tokens=size), transfer)
        for i, size in enumerate(sizes)
    ]


def measure_block_sizes(
    engines: list[Remote], *, name: str, sizes: tuple[int, int], settings: Settings, save: Save
) -> None:
    """Times to first token from each engine to the other, and whether all texts were right."""
    result: dict[str, Any] = {}
    try:
        begun(engines)
        use(engines, settings.prompts, settings.used)
        for prefill, decode, told in (
            (*engines, f"{sizes[0]} to {sizes[1]}"),
            (*engines[::-1], f"{sizes[1]} to {sizes[0]}, back"),
        ):
            figures = result[told] = {}
            decode.first(prefilled(prefill, [settings.prompts(settings.first)])[0])
            for length in settings.unequal:
                figures[str(length)] = unequal(prefill, decode, length, settings)
                save(name, result)
    except Exception as error:  # one way's failure is a result, too
        result["error"] = repr(error)[:500]
    finally:
        result["shutdown_s"] = [engine.close() for engine in engines]
    save(name, result)


def unequal(prefill: Remote, decode: Remote, length: int, settings: Settings) -> dict[str, Any]:
    """Prompts of one length, which need not be whole blocks: the right text is how prefill itself
    goes on, one token at a time. What decode has refused it has computed, and counted."""
    seconds, wrong, before = [], 0, decode.counts()
    for _ in range(min(3, settings.repeats)):
        prompt = settings.prompts(length)
        told = computed_apart(prefill, prompt)
        job = handed_whole(prefill, prompt, told[:1])
        done = decode.first({**job, "prompt": [*prompt, *told[:1]]})
        seconds.append(done["first"])
        wrong += done["text"] != told[1:]
    after = decode.counts()
    refused = after.get("pulls refused", 0) - before.get("pulls refused", 0)
    return {**spread(seconds), **counted(before, after), "refused": refused, "wrong_texts": wrong}


def handed_whole(prefill: Remote, prompt: list[int], following: list[int]) -> dict[str, Any]:
    """Tickets for all of a prompt. The cache is computed as when prefill goes on by itself: with
    windows it stops one token short, and is told one more."""
    from kvstow.adapters.vllm.protocol import OURS

    job = prefilled(prefill, [prompt])[0]
    if job["params"][OURS]["num_tokens"] < len(prompt):
        job = prefilled(prefill, [[*prompt, *following]])[0]
    return job
