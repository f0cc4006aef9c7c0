"""Predict a training step: bytes by phase and by module, FLOPs, seconds, and the settings that fit.

Modules build on each other in this order:

    count -> profile, skeleton, step -> compose, tree -> survey -> estimate -> plan -> report
"""

from streambp.planner.estimate import Estimate, estimate
from streambp.planner.plan import Memory, Plan, plan
from streambp.planner.profile import Profile, Setting, peak

__all__ = ["Estimate", "Memory", "Plan", "Profile", "Setting", "estimate", "peak", "plan"]
