"""From a sweep file to a table that can be trusted: search, train, measure, track."""

import os
import time

BORN = time.time()  # when this process began, as nearly as it can know

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler reports itself on standard error; read when torch is loaded
