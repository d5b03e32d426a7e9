"""Write the tables of troubleshooting.md: messages as the source has them, with what happened and what to do.

    python docs/troubleshooting.py

An entry names its messages by a part of their text. The suite fails if a part is in no message any more, if a reason or
a warning has no entry, and if the page is not what this script writes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from messages import Message, messages

PAGE = Path(__file__).with_suffix(".md")


class Entry(NamedTuple):
    parts: tuple[str, ...]  # each is part of at least one message
    happened: str
    fix: str


REASONS = [
    Entry(
        ("not called with the tensors the blocker returned",),
        "The tensors were moved, normalised or mixed between the blocker and the model.",
        "Change the [order of the lines](choosing.md#the-order-of-the-lines).",
    ),
    Entry(
        ("retained samples were changed in place",),
        "Something like `x.mul_(...)` or `x -= mean` ran after the blocker.",
        "Do it before the blocker.",
    ),
    Entry(
        ("called with other arguments than the blocker saw",),
        "The call has an argument more or less, or sets a flag.",
        "Pass the same arguments through the blocker: by name, as a dict, or as a tuple in first place.",
    ),
    Entry(
        ("not called on the retained samples",),
        "The blocker was called again before the model, or the batch was skipped.",
        "Call the model once for each call of the blocker. Skip a batch before the blocker.",
    ),
    Entry(
        ("the optimizer stepped before", "parameters or buffers changed between"),
        "An optimizer step, a weight average, `load_state_dict` or `.to(...)` came in between.",
        "Move it before the blocker, or behind the model's call.",
    ),
    Entry(
        ("autocast is not what it was",),
        "Autocast changes from step to step.",
        "Use the same autocast in every training step.",
    ),
    Entry(
        ("showed that it runs under autocast",),
        "Expected once, in the first pruned step. Counted, but no warning.",
        "Nothing.",
    ),
    Entry(
        ("changes its input in place",),
        "The forward pass has something like `x.sub_(mean)`.",
        "Write `x = x - mean`.",
    ),
    Entry(
        ("the model is compiled", "the shallow part is compiled"),
        "`torch.compile` is around the whole model, or around layers before the cut.",
        "`model = halfway.compile(model, at=...)` compiles only what comes after the cut (or after a later layer).",
    ),
    Entry(
        ("parts of this model are compiled",),
        "The selector looks at the model's output, so that all of its layers come before the cut.",
        "Compile the whole model, `torch.compile(model)`: its layers run twice. Or compile nothing: they are replayed.",
    ),
    Entry(
        ("sharded by FSDP2",),
        "A replay that has to be given up would run layers on one rank alone, and hang.",
        "Accept it, or use DDP.",
    ),
    Entry(
        ("communicates between processes", "writes buffers of its own"),
        "Ranks exchange values before the cut: FSDP2 gathers parameters, SyncBatchNorm statistics, DDP buffers; or a "
        "collective of the model's own.",
        "With FSDP2 accept it, or use DDP. Otherwise use plain BatchNorm before the cut, or accept it.",
    ),
    Entry(
        ("fused attention with dropout", "fused recurrent kernel"),
        "One kernel both draws random numbers and computes, or keeps its steps to itself.",
        "Leave out attention dropout before the cut; cut before an LSTM; or accept it.",
    ),
    Entry(
        ("under torch.utils.checkpoint",),
        "Dropout or BatchNorm before the cut is checkpointed, so that it runs again in the backward pass.",
        "Checkpoint only behind the cut.",
    ),
    Entry(
        ("runs autograd itself",),
        "The shallow part calls `torch.autograd.grad` or `torch.func`.",
        "Cut before it, or accept it.",
    ),
    Entry(
        ("branches on values of the batch", "other operations for other values", "with other numbers for other values"),
        "The program depends on values: `if x.max() > 1`, `.item()`.",
        "Take the branch out of the model, or accept it.",
    ),
    Entry(
        (
            "the shallow part shuffles",
            "output shape depends on the data",
            "mixes or reorders samples",
            "mixes samples, or random draws belong to others",
            "depend on the other samples of the batch",
            "depends on other samples of the batch: it follows",
            "not one part per sample",
            "draws random numbers from values that depend on other samples",
        ),
        "Samples see each other before the cut.",
        "Do it before the blocker, cut before it, or accept it.",
    ),
    Entry(
        ("random numbers are drawn by", "nothing shows whose random numbers", "did not show yet which sample"),
        "Random numbers cannot be assigned to samples; with few rows this may take some steps.",
        "Usually nothing. If it stays, draw before the blocker, or cut before the draw.",
    ),
    Entry(
        (
            "other operations than in the probe",
            "fewer operations than in the probe",
            "other operations on … samples",
            "given other parameters than in the probe",
            "is given other numbers for",
            "of another shape than in the rehearsal",
            "draws another shape than in the rehearsal",
            "fails on other samples than the whole batch",
        ),
        "The pass over all samples and the pass over the retained ones took different ways.",
        "Look for conditions on the batch size, and for state of your own.",
    ),
    Entry(
        ("in most steps",),
        "Every batch has a new shape.",
        "Pad to a few fixed lengths.",
    ),
    Entry(
        ("a spot check found",),
        "See the error on replayed and computed values below.",
        '`reuse="recompute"`, and please report it.',
    ),
    Entry(
        (
            "which reduces over the batch",
            "which counts the samples",
            "which numbers the samples",
            "which works along the batch",
            "which gives … for … samples",
            "which gives other values for a sample",
            "which is given another number",
            "which writes what it reads of the batch",
            "whose effect does not show",
            "of which nobody knows whether",
            "memory that was filled by something",
            "made of a list or an array",
        ),
        "From this operation on, values may depend on other samples. Operations behind it are computed again.",
        "`blocker.explain()` lists them. Often none of them is expensive; otherwise cut before it.",
    ),
]
WARNINGS = [
    Entry(
        ("halfway computes the shallow layers twice",),
        "A step was computed instead of replayed. It is right, and saves less. Each reason is given once.",
        'Look up the reason [below](#reasons-for-computing). `reuse="replay"` makes it an error, `reuse="recompute"` '
        "silences it.",
    ),
    Entry(
        ("of the shallow layers twice instead of replaying them: they follow",),
        "Samples see each other somewhere before the cut, so part of the shallow layers runs twice.",
        "`blocker.explain()` lists the operations. Cut before them, or accept it.",
    ),
    Entry(
        ("From now on the shallow layers are computed twice",),
        "A spot check failed: the shallow part does something that halfway cannot see.",
        '`reuse="recompute"`, and please report it.',
    ),
    Entry(
        ("looks at the model's output, so the cut",),
        "The method needs the whole forward pass of every sample, so there is no cut to choose.",
        "Pass `at=None`.",
    ),
    Entry(
        ("so nothing comes after the cut that could be compiled",),
        "`halfway.compile` compiles what comes after the cut, and this selector's cut is the model's output.",
        "Compile the whole model, `torch.compile(model)`: its layers run twice. Or compile nothing: they are replayed.",
    ),
    Entry(
        ("did not run in this batch", "did not run in this call"),
        "The layer at the cut is skipped at random.",
        "Cut at a layer that always runs.",
    ),
    Entry(
        ("the model is in eval mode",),
        "The blocker was called with gradients enabled on a model in eval mode.",
        "Call `model.train()`, or evaluate under `torch.no_grad()`.",
    ),
    Entry(
        ("though the schedule says so",),
        "Batches are so small that the ratio rounds to no sample.",
        "Use larger batches or a larger ratio.",
    ),
    Entry(
        ("learns from losses, but got none", "learns from losses but got none"),
        "The method needs losses, and the loop does not report them.",
        "Add the line that the warning names.",
    ),
    Entry(
        ("samples without a score are drawn at random",),
        "The window of `dyn_unc` is longer than the visits that a sample gets before the choice.",
        "Take a smaller window, or begin to prune later.",
    ),
    Entry(
        ("training goes on, but not bit-identically",),
        "A checkpoint is loaded by another number of processes.",
        "Nothing, or use as many processes as before.",
    ),
]
ERRORS = [
    Entry(
        ("replayed and computed values differ: ",),
        "`ReplayError`. A spot check failed: the shallow part does something that halfway cannot see, or parameters "
        "were written through `.data`.",
        '`reuse="recompute"`, and please report it.',
    ),
    Entry(
        ("was demanded, but",),
        '`ReplayError`. With `reuse="replay"` a step that cannot be replayed is an error.',
        'Look up the reason above, or use `reuse="auto"`.',
    ),
    Entry(
        ("contain values that are not finite",),
        "`FloatingPointError`. NaN or infinity since the last look. With float16 autocast an overflow that "
        "`GradScaler` would skip can cause it, too.",
        "Lower the learning rate, clip gradients, check the inputs.",
    ),
    Entry(
        ("set_epoch was never called",),
        "`RuntimeError`. The schedule counts epochs.",
        'Call it at the start of each epoch, or use `Schedule(..., unit="step")`.',
    ),
    Entry(
        ("belongs to another configuration",),
        "`ValueError`. The checkpoint was written with other settings, which the message lists.",
        "Use the same settings, or start without the state.",
    ),
    Entry(
        ("never runs in the model's forward pass", "runs more than once in one forward pass"),
        "`ValueError`, in the first batch. Nothing can be cut there.",
        "`halfway layers MODEL` lists the layers that work.",
    ),
    Entry(
        ("nothing that could be compiled runs after layer",),
        "`ValueError`, in the first training call after `halfway.compile`. The cut is too near to the model's end.",
        "Cut earlier, or use `torch.compile(model)`.",
    ),
    Entry(
        ("that halfway cannot put",),
        "`TypeError`, in the first batch. The model holds an iterator or a generator that its forward pass advances.",
        "Do what the message says, so that a second pass changes nothing.",
    ),
]
TABLES = {"warnings": WARNINGS, "reasons": REASONS, "errors": ERRORS}


def having(part: str, found: list[Message]) -> list[str]:
    """Different messages that hold `part`, in the order of the source."""
    return list(dict.fromkeys(message.text for message in found if part in message.text))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _quoted(text: str) -> str:
    """As code, so that nothing in it is read as Markdown."""
    return f"`` {_cell(text)} ``" if "`" in text else f"`{_cell(text)}`"


def table(entries: list[Entry], found: list[Message]) -> str:
    lines = ["| message | what happened | what to do |", "|---|---|---|"]
    for entry in entries:
        texts = dict.fromkeys(text for part in entry.parts for text in having(part, found))
        lines.append(f"| {'<br>'.join(map(_quoted, texts))} | {entry.happened} | {entry.fix} |")
    return "\n".join(lines)


def render(page: str) -> str:
    """The page with its tables written anew, between their marks."""
    found = messages()
    for name, entries in TABLES.items():
        begin, end = f"<!-- {name}: written by troubleshooting.py -->", f"<!-- end of {name} -->"
        text = f"{begin}\n\n{table(entries, found)}\n\n{end}"
        page, count = re.subn(
            re.escape(begin) + ".*?" + re.escape(end), lambda _, text=text: text, page, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{PAGE.name} has no place for the table of {name}")
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
