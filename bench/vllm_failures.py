"""What becomes of handed-over requests that cannot be served, and of damaged rows, inside vLLM."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import vllm_damage
from vllm_engines import Remote, use
from vllm_pairs import Save, Settings, begun, prefilled

LEASE_SECONDS = 2


def measure_failures(engines: list[Remote], *, settings: Settings, save: Save) -> None:
    """What becomes of handed-over requests that cannot be served: seconds, counters, texts."""
    results: dict[str, Any] = {}
    cases = {
        "the ticket was used before": used_ticket,
        "the lease has expired and its blocks were reused": expired,
        "the ticket is forged": forged,
        "the ticket is of another prompt": of_another_prompt,
        "prefill is killed during the pull": killed,
    }
    try:
        begun(engines)
        use(engines, settings.prompts, settings.used)
        for name, case in cases.items():
            prompt = settings.prompts(settings.failing + 1)
            results[name] = failed(*engines, prompt, settings, case)
            save("kvstow", results)
    finally:
        for engine in engines:
            engine.close()


def failed(
    prefill: Remote, decode: Remote, prompt: list[int], settings: Settings, case: Any
) -> dict[str, Any]:
    """One case: the job is spoilt, decode must compute it, and count it."""
    right = prefill.first({"prompt": prompt})["text"]
    job = prefilled(prefill, [prompt])[0]
    before = decode.counts()
    done = case(prefill, decode, job, settings)
    if done is None:
        done = decode.first(job)
    grown = {k: v - before.get(k, 0.0) for k, v in decode.counts().items()}
    faults = ("pulls ", "refused_requests")
    return {
        "first_token_s": round(done["first"], 3),
        "counted": {k: v for k, v in grown.items() if v and k.startswith(faults) and k[-1] != "s"},
        "text_is_right": done["text"] == right,
    }


def used_ticket(prefill: Remote, decode: Remote, job: dict[str, Any], settings: Settings) -> None:
    decode.first(job)
    fill(decode, settings)


def expired(prefill: Remote, decode: Remote, job: dict[str, Any], settings: Settings) -> None:
    time.sleep(LEASE_SECONDS + 1)
    fill(prefill, settings)


def fill(engine: Remote, settings: Settings) -> None:
    """Push everything out of a pool."""
    prompts = [settings.prompts(settings.failing) for _ in range(settings.filling)]
    engine.run([{"prompt": prompt, "max_tokens": 1} for prompt in prompts], 2)


def forged(prefill: Remote, decode: Remote, job: dict[str, Any], settings: Settings) -> None:
    from kvstow.adapters.vllm.protocol import OURS
    from kvstow.transfer.tickets.ticket import Ticket

    carried = job["params"][OURS]
    ticket = Ticket.parse(carried["tickets"][0])
    carried["tickets"] = [str(replace(ticket, lease=ticket.lease ^ 1))]


def of_another_prompt(
    prefill: Remote, decode: Remote, job: dict[str, Any], settings: Settings
) -> None:
    other = prefilled(prefill, [settings.prompts(len(job["prompt"]))])[0]
    job["params"] = other["params"]


def killed(prefill: Remote, decode: Remote, job: dict[str, Any], settings: Settings) -> Any:
    decode.begin([job])
    time.sleep(0.012)
    prefill.kill()
    return decode.answer(120)["jobs"][0]


def measure_damage(
    engines: list[Remote], *, settings: Settings, save: Save, shared: str, folder: Path
) -> None:
    """Damaged rows of the host tier, and of the disk tier."""
    from kvstow.offload.host.shared import remove

    files = (partial(vllm_damage.host_files, shared), partial(vllm_damage.disk_files, folder))
    forget = partial(fill, settings=settings)
    results: dict[str, Any] = {}
    try:
        begun(engines)
        for name, engine, found in zip(("host memory", "disk"), engines, files, strict=True):
            results[name] = vllm_damage.measured(
                engine, settings.prompts, settings.first, forget, found
            )
            save("kvstow", results)
    finally:
        for engine in engines:
            engine.close()
        remove(shared)
