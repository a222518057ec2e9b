"""An asynchronous GPU on a CPU, in Python alone: `make fake-cuda`.

Results equal the CPU's. The difference is when a kernel runs: the host enqueues, and a
stream runs as a schedule says. A kernel that reads what no order guarantees reads NaN: memory that
was not written yet, or that was freed. Graphs are recorded and replayed; waits of the host are
listed with their lines.

Not emulated: autograd's device threads (a backward fails), DataParallel, pools of memory of graphs
(their memory is never freed), several devices. Tests that need them are marked `not_emulated`.
"""

from support.fake_cuda.device import FakeCuda as FakeCuda
from support.fake_cuda.schedules import SCHEDULES as SCHEDULES
from support.fake_cuda.waits import Wait as Wait
