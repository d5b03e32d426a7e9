"""A flag on the device."""

from __future__ import annotations

import torch

from halfway.state.flags import StickyFlag


def test_a_flag_stays_up_until_it_is_asked_for() -> None:
    flag = StickyFlag()
    assert not flag.take()
    for found in (False, True, False):
        flag.note(torch.tensor(found))
    assert flag.take()
    assert not flag.take()
    flag.note(torch.tensor(False))
    assert not flag.take()
