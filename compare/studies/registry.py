"""The studies: a class each, by the word of its command. A new one is named here, and nowhere else."""

from compare.studies.accumulation import Accumulation
from compare.studies.bench import Bench
from compare.studies.buckets import Buckets
from compare.study import Study

STUDIES: dict[str, type[Study]] = {study.word(): study for study in (Bench, Buckets, Accumulation)}
