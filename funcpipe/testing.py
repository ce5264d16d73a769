"""Helpers for the tests of one's own stages and plans; ``import funcpipe.testing`` brings them in.

`check_stage` looks at one stage, `assert_matches_sequential` at what a plan computes, `FaultAt`
makes a stage fail, `first_difference` compares the values of two runs, or of a run and a model.
"""

from __future__ import annotations

from funcpipe._src.testing.check import FAULTS as FAULTS
from funcpipe._src.testing.check import CheckError as CheckError
from funcpipe._src.testing.check import StageReport as StageReport
from funcpipe._src.testing.check import check_stage as check_stage
from funcpipe._src.testing.difference import Difference as Difference
from funcpipe._src.testing.difference import ValueRecord as ValueRecord
from funcpipe._src.testing.difference import first_difference as first_difference
from funcpipe._src.testing.difference import record_values as record_values
from funcpipe._src.testing.fault import Fault as Fault
from funcpipe._src.testing.fault import FaultAt as FaultAt
from funcpipe._src.testing.match import assert_matches_sequential as assert_matches_sequential
from funcpipe._src.testing.model_record import record_model as record_model
