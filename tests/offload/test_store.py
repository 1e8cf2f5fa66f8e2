"""The store that users see: prefixes saved and loaded, in tiers, by other processes."""

import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import sleep

import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError, SpecError, StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.copies import mover
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.journal import FILE
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.sizing.plan import plan_model
from offloading import IDENTITY, layer, row_bytes, row_files

MIB = 1 << 20


def layout_of(order="BLHNC", *, identity=IDENTITY, model="m", tp=(0, 1)):
    """Full, window and recurrent layers, blocks of four tokens."""
    layers = [
        layer("l.0", Full()),
        layer("l.1", Window(8)),
        layer("l.2", State()),
    ]
    layout = packed(grouped(layers), num_slabs=40, site=Site(model=model, order=order, tp=tp))
    return layout if identity is None else layout.identified(identity)


def computed(layout, num_tokens, seed=1):
    """An arena full of noise and the blocks of a request that has computed so many tokens."""
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    memory = arena.bytes.numpy()
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)
    return arena, ledger.blocks(ledger.admit(num_tokens).request)


def seen(layout, g, k, num_tokens):
    """Whether the token at `num_tokens` sees something of block `k`: a window is 8 tokens."""
    window = isinstance(layout.groups[g].group.retention, Window)
    return not window or 4 * (k + 1) > num_tokens - 7


def rows_of(arena, blocks, num_tokens):
    """The bytes of the blocks that the next token sees."""
    memory = arena.bytes.numpy()
    return {
        (g, int(k)): row_bytes(arena.layout, g, int(id), memory).tobytes()
        for g, listed in blocks.items()
        for id, k in zip(listed.ids, listed.index, strict=True)
        if seen(arena.layout, g, int(k), num_tokens)
    }


KINDS = {
    "host": {"host": "1MiB"},
    "disk": {"disk": "kv", "disk_bytes": "2MiB"},
    "both": {"host": MIB, "disk": "kv", "disk_bytes": 2 * MIB},
}


@pytest.fixture
def make(tmp_path):
    def made(kind, **options):
        words = {**KINDS[kind], **options}
        if "disk" in words:
            words["disk"] = tmp_path / words["disk"]
        return Store(**words)

    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 18, 23])
def test_a_prompt_comes_back_whole_with_its_window_and_its_state(make, kind, num_tokens):
    layout, prompt = layout_of(), Prompt.of(np.arange(num_tokens), salt=b"s")
    arena, blocks = computed(layout, num_tokens)
    store = make(kind)
    saved = store.save(arena, blocks, prompt)
    assert saved == sum(len(listed) for listed in blocks.values())
    assert store.stored_tokens(prompt) == num_tokens
    other, there = computed(layout, num_tokens, seed=2)
    assert store.load(other, prompt, into=there) == num_tokens
    assert rows_of(other, there, num_tokens) == rows_of(arena, blocks, num_tokens)
    store.close()


@pytest.mark.parametrize("num_tokens", [4, 6, 18])
def test_rows_that_a_pull_has_failed_to_fill_are_not_saved(make, num_tokens):
    """A running state and a last row that is not full were, and came back as the prompt's."""
    layout, prompt = layout_of(), Prompt.of(np.arange(num_tokens))
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    request = ledger.admit(num_tokens).request
    for g, listed in ledger.blocks(request).items():
        ledger.pool.distrust(g, listed.ids)
    store = make("host")
    assert store.save(arena, ledger.blocks(request), prompt) == 0
    assert store.stored_tokens(prompt) == 0
    store.close()


def test_a_longer_prompt_takes_the_beginning_that_every_group_can_serve(make):
    layout = layout_of()
    prompt = Prompt.of(np.arange(16))
    arena, blocks = computed(layout, 16)
    store = make("disk")
    store.save(arena, blocks, prompt)
    longer = prompt.extended([7, 8, 9, 10, 11])
    assert store.stored_tokens(longer) == 16
    assert store.stored_tokens(longer, most=15) == 0  # the state was kept at 16 only
    assert store.stored_tokens(Prompt.of([5, *range(1, 21)])) == 0
    other, there = computed(layout, 16, seed=2)
    assert store.load(other, longer, into=there) == 16
    assert rows_of(other, there, 16) == rows_of(arena, blocks, 16)
    store.close()


def test_blocks_that_are_not_listed_are_not_loaded(make):
    layout, prompt = layout_of(), Prompt.of(np.arange(16))
    arena, blocks = computed(layout, 16)
    store = make("disk")
    store.save(arena, blocks, prompt)
    short = {g: type(listed)(listed.ids[:1], listed.index[:1]) for g, listed in blocks.items()}
    before = arena.bytes.numpy().copy()
    assert store.load(arena, prompt, into=short) == 0
    assert (arena.bytes.numpy() == before).all()
    store.close()


def test_a_row_that_is_gone_costs_the_prefix_not_more(make):
    layout, prompt = layout_of(), Prompt.of(np.arange(16))
    arena, blocks = computed(layout, 16)
    store = make("disk")
    store.save(arena, blocks, prompt)
    data = row_files(store.disk.path)[0]
    damaged = bytearray(data.read_bytes())
    damaged[4096] ^= 1
    data.write_bytes(damaged)
    other, there = computed(layout, 16, seed=2)
    assert store.load(other, prompt, into=there) == 0
    assert store.disk.counts.failures == 1
    store.close()


# ── which computation ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_refuses_to_guess_which_computation_it_keeps(make, kind):
    layout, prompt = layout_of(identity=None), Prompt.of(np.arange(8))
    arena, blocks = computed(layout, 8)
    store = make(kind)
    with pytest.raises(StoreError, match=r"hint: pass identity=Identity\.of\(model_dir\)"):
        store.save(arena, blocks, prompt)
    with make(kind, identity=IDENTITY) as store:
        assert store.save(arena, blocks, prompt)
        assert store.identity == IDENTITY


@pytest.mark.parametrize("kind", KINDS)
def test_another_checkpoint_of_the_same_shape_is_refused(make, kind):
    other = replace(IDENTITY, weights="02" * 16)
    arena, blocks = computed(layout_of(), 8)
    theirs, there = computed(layout_of(identity=other), 8, seed=2)
    prompt = Prompt.of(np.arange(8))
    store = make(kind)
    store.save(arena, blocks, prompt)
    with pytest.raises(StoreError, match="weights is"):
        store.load(theirs, prompt, into=there)
    store.close()
    if kind != "host":
        with make(kind) as store, pytest.raises(StoreError, match="weights is"):
            store.load(theirs, prompt, into=there)


def test_requests_with_adapters_and_salts_keep_to_themselves(make):
    layout, prompt = layout_of(), Prompt.of(np.arange(8))
    arena, blocks = computed(layout, 8)
    store = make("disk").bind(layout)
    tuned = store.identity.for_request(adapter="lora")
    store.save(arena, blocks, prompt, identity=tuned)
    assert store.stored_tokens(prompt) == 0
    assert store.stored_tokens(prompt, identity=tuned) == 8
    store.close()


# ── shape ─────────────────────────────────────────────────────────────────────────────


def test_a_store_needs_a_place_a_layout_and_sizes_that_can_be(make, tmp_path):
    with pytest.raises(StoreError, match="without a place"):
        Store()
    with pytest.raises(StoreError, match="no layout yet"):
        make("host").stored_tokens(Prompt.of([1]))
    with pytest.raises(Exception, match="is not a size"):
        Store(host="lots")
    with pytest.raises(StoreError, match="capacity"):
        Store(disk=tmp_path / "new").bind(layout_of())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ids", "what"), [([5, 5], "blocks 5 are named twice"), ([0, 5], "blocks 0 are not among")]
)
def test_a_block_named_twice_or_a_null_row_is_neither_saved_nor_loaded(make, kind, ids, what):
    """Two keys of one block would both count as loaded; null rows pad tables."""
    arena, _ = computed(layout_of(), 4)
    keys = [b"first key", b"second key"]
    with make(kind).bind(arena.layout) as store:
        with pytest.raises(BlockError, match=what):
            store.save_rows(arena, 0, ids, keys)
        assert not store.contains(0, keys).any()
        assert store.save_rows(arena, 0, [5, 6], keys).all()
        before = arena.bytes.clone()
        with pytest.raises(BlockError, match=what):
            store.load_rows(arena, 0, keys, ids)
        assert (arena.bytes == before).all()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_no_bytes_and_too_few_links_are_refused(make, kind):
    """Text as a key was kept in host memory, and lost on its way to the disk."""
    arena, _ = computed(layout_of(), 4)
    with make(kind).bind(arena.layout) as store:
        with pytest.raises(StoreError, match="keys are str, not bytes"):
            store.save_rows(arena, 0, [5], ["key"])
        with pytest.raises(StoreError, match="1 links for 2 keys"):
            store.save_rows(arena, 0, [5, 6], [b"a", b"b"], [ChainLink()])


def test_a_journal_that_there_is_not_is_refused_at_once(make):
    with pytest.raises(StoreError, match="journal='all' is none of digests, tokens, off"):
        make("disk", journal="all")


def test_ranks_have_folders_of_their_own(make, tmp_path):
    for rank in range(2):
        make("disk").bind(layout_of(tp=(rank, 2))).close()
    names = {path.name for path in (tmp_path / "kv").iterdir()}
    assert names == {"tp0of2-pp0of1", "tp1of2-pp0of1"}


def test_a_prefix_saved_here_is_loaded_by_another_process_in_ten_lines(tmp_path):
    common = """
        import numpy as np, sys
        from kvstow.blocks.ledger import Ledger
        from kvstow.blocks.pool import Pool
        from kvstow.blocks.prompt import Prompt
        from kvstow.memory.arena import Arena
        from kvstow.offload.store import Store
        from offloading import hybrid
        layout, prompt = hybrid(), Prompt.of(np.arange(16))
        arena, ledger = Arena(layout), Ledger(Pool(layout))
        blocks = ledger.blocks(ledger.admit(len(prompt)).request)
        store = Store(disk=sys.argv[1], disk_bytes="4MiB")
    """
    one = (
        common
        + """
        arena.tensor("l.2")[blocks[0].ids] = 1.5
        print(store.save(arena, blocks, prompt))
        store.close()
    """
    )
    two = (
        common
        + """
        print(store.load(arena, prompt, into=blocks))
        print(float(arena.tensor("l.2")[blocks[0].ids].min()))
        store.close()
    """
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "kv")],
            capture_output=True,
            text=True,
            cwd="tests",
            timeout=120,
        )
        for code in (one, two)
    ]
    assert [run.returncode for run in said] == [0, 0], said[-1].stderr
    assert said[1].stdout.split() == ["16", "1.5"]


# ── what is refused, and what goes on ─────────────────────────────────────────────────


def test_threads_that_save_blocks_of_one_arena_never_store_each_others_bytes(make, monkeypatch):
    """Without a host tier rows go through a window, which is one piece of memory."""

    def slow(*arguments, **options):
        under_way = true_copy(*arguments, **options)
        sleep(0.002)
        return under_way

    true_copy = mover.copy
    monkeypatch.setattr(mover, "copy", slow)
    layers = [layer("l.0", Full()), layer("l.1", Full())]
    site = Site(model="m", order="LBHNC")
    layout = packed(grouped(layers), num_slabs=40, site=site).identified(IDENTITY)
    arena, _ = computed(layout, 1)
    ledger = Ledger(Pool(layout))
    held = [ledger.blocks(ledger.admit(18).request) for _ in range(3)]
    prompts = {
        (worker, n): Prompt.of(np.arange(18) + 100 * worker + 1000 * n)
        for worker in range(3)
        for n in range(6)
    }
    with make("disk", disk_bytes="16MiB").bind(layout) as store:

        def save(worker):
            for n in range(6):
                store.save(arena, held[worker], prompts[worker, n])

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(save, range(3)))
        for (worker, _), prompt in prompts.items():
            other, there = computed(layout, 18, seed=2)
            assert store.load(other, prompt, into=there) == 18
            saved = rows_of(arena, held[worker], 18)
            assert rows_of(other, there, 18) == saved


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_store_says_so(make, kind):
    layout, prompt = layout_of(), Prompt.of(np.arange(18))
    arena, blocks = computed(layout, 18)
    store = make(kind)
    store.save(arena, blocks, prompt)
    store.close()
    store.close()
    for use in (
        lambda: store.save(arena, blocks, prompt),
        lambda: store.load(arena, prompt, into=blocks),
        lambda: store.stored_tokens(prompt),
        lambda: store.save_rows(arena, 0, [], []),
        lambda: store.load_rows(arena, 0, [], []),
    ):
        with pytest.raises(StoreError, match="the store is closed"):
            use()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_no_tokens_is_found_nowhere(make, kind):
    layout, nothing = layout_of(), Prompt.of(np.arange(0))
    arena, blocks = computed(layout, 18)
    with make(kind) as store:
        assert store.save(arena, blocks, nothing) == 0
        assert store.stored_tokens(nothing, most=len(nothing) - 1) == 0
        assert store.load(arena, nothing, into=blocks, most=len(nothing) - 1) == 0


def test_blocks_that_leave_out_a_group_are_refused_by_name(make):
    layout, prompt = layout_of(), Prompt.of(np.arange(18))
    arena, blocks = computed(layout, 18)
    with make("disk") as store:
        store.save(arena, blocks, prompt)
        with pytest.raises(StoreError, match=r"1 of 3 groups: window8\n\nhint"):
            store.load(arena, prompt, into={g: b for g, b in blocks.items() if g != 1})


@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_a_path_that_names_no_directory_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for places in ({"disk": path, "disk_bytes": MIB}, {"host": MIB, "journal_path": path}):
        with pytest.raises(StoreError, match="names no directory"):
            Store(**places)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_journal_does_not_stop_a_load_whose_end_is_logged(make, tmp_path, caplog):
    layout, prompt = layout_of(), Prompt.of(np.arange(18))
    arena, blocks = computed(layout, 18)
    with make("disk") as store:
        store.save(arena, blocks, prompt)
    (tmp_path / "kv" / FILE).unlink()
    (tmp_path / "kv" / FILE).mkdir()
    with make("disk") as store, caplog.at_level("DEBUG", "kvstow.offload"):
        assert store.load(arena, Prompt.of([*range(12), 99]), into=blocks) == 0
        assert store.load(arena, prompt, into=blocks) == 18
    assert "cannot be read" in caplog.text


def test_a_disk_that_fails_when_it_is_closed_keeps_nothing_else_open(tmp_path, monkeypatch):
    store = Store(host="1MiB", disk=tmp_path, disk_bytes="4MiB").bind(layout_of())
    host, closed = store.host, []

    def fails():
        raise StoreError("on purpose")

    monkeypatch.setattr(store.disk, "close", fails)
    monkeypatch.setattr(host, "close", lambda: closed.append(True))
    with pytest.raises(StoreError, match="on purpose"):
        store.close()
    assert closed == [True]
    with pytest.raises(StoreError, match="closed"):
        _ = store.tiers


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("is_load", [False, True])
def test_an_interrupted_call_ends_when_nothing_uses_the_blocks_any_more(make, monkeypatch, is_load):
    prompt = Prompt.of(range(8))
    arena, blocks = computed(layout_of(), 8)
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def slow(*given, **more):
        begun.set()
        may_end.wait(10)
        under_way = true_copy(*given, **more)
        ended.append(1)
        return under_way

    def interrupt():
        begun.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sleep(0.5)
        may_end.set()

    true_copy, thread = mover.copy, threading.Thread(target=interrupt)
    with make("host") as store:
        if is_load:
            store.save(arena, blocks, prompt)
        call = partial(store.load, into=blocks) if is_load else partial(store.save, blocks=blocks)
        monkeypatch.setattr(mover, "copy", slow)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            call(arena, prompt=prompt)
        assert ended
        thread.join()


def test_a_store_lets_go_of_arenas_that_are_closed(make):
    layout = layout_of()
    with make("both") as store:
        for n in range(6):
            arena, blocks = computed(layout, 18, seed=n)
            store.save(arena, blocks, Prompt.of(np.arange(n, n + 18)))
            arena.close()
            assert store.flush()
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("kvstow-mover-load") for name in names) <= 4
        arena, blocks = computed(layout, 18, seed=99)
        for n in range(6):  # what came from them has reached the disk
            assert store.stored_tokens(Prompt.of(np.arange(n, n + 18))) == 18


def test_what_is_no_layout_no_identity_or_no_blocks_is_refused_with_what_to_do():
    plan = plan_model("gemma-3-270m", memory="1MiB")
    with pytest.raises(SpecError, match="expected a Layout or a Plan, got str"):
        Store(host="1MiB", identity=IDENTITY).bind("llama")
    with pytest.raises(StoreError, match=r"an identity is str\n\nhint: .*Identity\.of"):
        Store(host="1MiB", identity="llama").bind(plan.layout)
    arena, _ = computed(layout_of(), 8)
    with Store(host="1MiB") as store:
        with pytest.raises(StoreError, match=r"not as int\n\nhint: ledger\.blocks"):
            store.save(arena, 0, Prompt.of(range(8)))
        with pytest.raises(StoreError, match=r"not as int\n\nhint: ledger\.blocks"):
            store.load(arena, Prompt.of(range(8)), into=0)


def test_a_file_in_the_place_of_a_store_is_said_to_be_none(tmp_path):
    (tmp_path / "kv").touch()
    with pytest.raises(StoreError, match=r"store .*kv: Not a directory"):
        Store(disk=tmp_path / "kv", disk_bytes="1MiB").bind(layout_of())
