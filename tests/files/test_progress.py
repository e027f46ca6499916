"""Work inside other work: what is done of it counts for that, if it is counted in the same unit."""

from __future__ import annotations

from anesurgery.files.progress import advance, listening, work


def test_parts_of_the_same_unit_count_for_the_whole_and_others_for_themselves() -> None:
    with listening() as listener, work(3, "weights"):
        whole = listener.amount
        assert whole is not None
        with work(1000):
            advance(600)
            part = listener.amount
            assert part is not None
            assert (part.total, part.done) == (1000, 600)
        with work(2, "weights"):
            advance(2)
        assert listener.amount is whole
        assert whole.done == 2
    assert listener.amount is None
