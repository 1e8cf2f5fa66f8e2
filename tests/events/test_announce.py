"""The announcer: hashes that came and went become events with tokens."""

from kvstow.events.announce import Announcer, GroupKind
from kvstow.events.format import BlockRemoved, BlockStored

FULL = GroupKind(index=3, block_tokens=2, kind="full_attention")
WINDOW = GroupKind(index=5, block_tokens=4, kind="sliding_window", window=8)


def announcer(**options: int) -> Announcer:
    made = Announcer([FULL, WINDOW], **options)
    made.know([11, 12, 13], [1, 2, 3, 4, 5, 6, 7], 2, keys=[b"a", b"b", b"c"])
    return made


def test_blocks_that_follow_one_another_are_one_event():
    made = announcer()
    made.stored("CPU", 0, [b"a", b"b", b"c"])
    (event,) = made.take()
    assert event == BlockStored(
        [11, 12, 13],
        None,
        [1, 2, 3, 4, 5, 6],
        2,
        None,
        "CPU",
        None,
        group_idx=3,
        kv_cache_spec_kind="full_attention",
    )
    assert made.take() == []


def test_a_gap_begins_another_event_with_the_hash_before_it():
    made = announcer()
    made.stored("CPU", 0, [b"a", b"c"])
    first, second = made.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([11], None)
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([13], 12, [5, 6])


def test_device_and_tiers_call_a_block_by_the_same_hash():
    made = announcer()
    made.stored("GPU", 0, [11])
    made.stored("STORAGE", 0, [b"a"])
    device, disk = made.take()
    assert isinstance(device, BlockStored)
    assert isinstance(disk, BlockStored)
    assert device.block_hashes == disk.block_hashes == [11]


def test_nothing_is_announced_twice_and_only_what_was_announced_is_taken_back():
    made = announcer()
    made.stored("CPU", 0, [b"a"])
    made.stored("CPU", 0, [b"a"])
    made.removed("GPU", 0, [11])
    made.removed("CPU", 0, [b"b"])
    assert len(made.take()) == 1
    made.removed("CPU", 0, [b"a", b"b"])
    assert made.take() == [BlockRemoved([11], "CPU", 3)]
    made.stored("CPU", 0, [b"a"])
    assert len(made.take()) == 1


def test_blocks_of_another_size_are_not_taken_for_these():
    made = announcer()
    made.stored("GPU", 1, [11])
    assert made.take() == []
    made.know([12], [1, 2, 3, 4], 4)
    made.stored("GPU", 1, [12])
    (event,) = made.take()
    assert isinstance(event, BlockStored)
    assert (event.block_size, event.token_ids, event.group_idx) == (4, [1, 2, 3, 4], 5)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 8)


def test_the_oldest_tokens_are_forgotten_first():
    made = announcer(most_blocks=3)
    made.know([21], [8, 9], 2, keys=[b"x"])
    made.stored("CPU", 0, [b"a", b"b", b"x"])
    assert [event.block_hashes for event in made.take() if isinstance(event, BlockStored)] == [
        [12],
        [21],
    ]


def test_adapter_salt_and_images_stand_in_the_extra_keys():
    made = Announcer([FULL])
    made.know([1, 2], [5, 6, 7, 8], 2, adapter="poems", salt="tenant", content=[(3, b"\xab\xcd")])
    made.stored("GPU", 0, [1, 2])
    (event,) = made.take()
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [["poems", "tenant"], ["poems", "abcd"]]
    assert event.lora_name == "poems"


def test_a_store_on_another_machine_is_called_remote():
    made = announcer()
    made.stored("STORAGE", 0, [b"a"], remote=True)
    made.stored("STORAGE", 0, [b"a"])
    made.removed("STORAGE", 0, [b"a"], remote=True)
    remote, local, removed = made.take()
    assert isinstance(remote, BlockStored)
    assert isinstance(local, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (remote.locality, local.locality, removed.locality) == ("REMOTE", None, "REMOTE")
