"""Tables of ledgers: sums, what does not fit, and what is not shown."""

import msgspec

from compare.commands.ledger import EngineLedger, engine_ledger, layouts_of, sentence, table_of_layout
from compare.contract.communication import Communication, of_busiest_stage, summed
from compare.contract.ledger import Ledger
from compare.judge.alone import judged
from compare.judge.textbook import line_up
from compare.setup.presets import spread
from compare.spec.experiment import Experiment, Layout, Model, Train
from tests.support.records import make_ledger, make_record

EXPERIMENT = Experiment(
    model=Model(n_layer=4, n_head=4, n_embd=32, block_size=16, vocab_size=64, bias=True),
    train=Train(batch_size=16, gradient_accumulation_steps=2),
    layout=Layout(remat="none"),
)
FSDP = spread(EXPERIMENT, "fsdp", 4)


def test_ledger_lists_objections(tmp_path):
    record = make_record(tmp_path / "run", FSDP, ladder=False, tensors={})
    rows = make_ledger("torch-manual", FSDP)[1:]
    other = msgspec.structs.replace(record, ledger=Ledger(rows=rows, problems=["a loop, at mine.py:3"]))
    unexpected = engine_ledger("mine", other, judged(other).alone).unexpected
    assert "a loop, at mine.py:3" in unexpected[0]
    assert "0 bytes of " in unexpected[1]
    assert engine_ledger("mine", record).uncompared == "the record was never judged"


def test_sums_are_of_the_largest_stage():
    send = Communication(kind="permute", axis="pp", calls=1, bytes=100, wire_bytes=1)
    gather = Communication(kind="all_gather", axis="dp_shard", calls=1, bytes=30, wire_bytes=2, stage=1)
    rows = [send, msgspec.structs.replace(send, bytes=40, stage=1), gather]
    assert [(row.kind, row.bytes) for row in summed(rows)] == [("all_gather", 30), ("permute", 100)]
    assert {row.stage for row in of_busiest_stage(rows)} == {1}


def test_no_ledger_hides_another():
    """Two ledgers of one engine under one layout are both shown; a missing case is named with its reason."""
    first = EngineLedger(
        case="one",
        engine="torch-manual",
        experiment=FSDP,
        platform="gpu",
        flows=line_up("torch-manual", FSDP, []),
    )
    fsdp = [
        first,
        msgspec.structs.replace(first, case="two", unexpected=["nothing"]),
        msgspec.structs.replace(first, case="three", uncompared="no closed form"),
    ]
    assert [[ledger.case for ledger in group] for group in layouts_of(fsdp)] == [["one"], ["two"], ["three"]]
    assert table_of_layout([first]).name.endswith(f"{FSDP.layout.devices} GPU devices")
    assert sentence(fsdp, {"torch-library.pp": "died"}) == (
        "3 cases; 0 of 6 flows are the textbook's to the byte, the others 0.00 to 0.00 times "
        "(docs/compilers.md); UNEXPECTED: two; not judged: three; MISSING: torch-library.pp"
    )
