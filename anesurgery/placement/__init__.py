"""Predict where each op runs, say why, and name the pass that repairs it."""

from anesurgery.placement.evidence import Finding as Finding
from anesurgery.placement.evidence import Grade as Grade
from anesurgery.placement.evidence import Rule as Rule
from anesurgery.placement.evidence import Scope as Scope
from anesurgery.placement.inspection import Estimate as Estimate
from anesurgery.placement.inspection import Inspection as Inspection
from anesurgery.placement.inspection import Memory as Memory
from anesurgery.placement.inspection import OpRow as OpRow
from anesurgery.placement.inspection import Segment as Segment
from anesurgery.placement.target import Target as Target
