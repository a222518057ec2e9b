"""Plans: hooks, interventions and captures of a request, said once and opened for nothing."""

# A plan is data. `Plan.prepare` registers its hooks with a model, once, in a frame that is never
# entered. `Prepared.open` makes a request: a frame that shares those hooks, so that they fire in
# the contexts that entered it, and that has its own collectors, each made at its first capture.
# A native hook of a plan gets the request that it runs for, the owner. A hook on the
# model checks, in each of its calls in a request, that no module was replaced, and finds the
# positions of the tokens, if the plan names any.

from ferrohook.plans.entries import gate as gate
from ferrohook.plans.entries import keep as keep
from ferrohook.plans.entries import on as on
from ferrohook.plans.entries import replay as replay
from ferrohook.plans.entries import stop as stop
from ferrohook.plans.plan import Plan as Plan
from ferrohook.plans.prepared import Prepared as Prepared
from ferrohook.plans.prepared import Request as Request
from ferrohook.plans.prepared_plans import PreparedPlans as PreparedPlans

__all__ = ["Plan", "Prepared", "PreparedPlans", "Request", "gate", "keep", "on", "stop"]
