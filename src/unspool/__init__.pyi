# The public API: one line per name, with the module that defines it. `__init__.py` loads names by this list.
# ruff: noqa: I001
from typing import TYPE_CHECKING

__version__: str

if TYPE_CHECKING:  # otherwise the modules, which import `__version__` from here, would be one cycle
    # Models
    from unspool.models.extend import load as load
    from unspool.models.extend import extend as extend
    from unspool.models.merge import merge as merge
    from unspool.recipe.export import export as export
    from unspool.models.attention.interface import register as register

    # Generation
    from unspool.evals.generate import generate as generate
    from unspool.evals.generate import load_generator as load_generator
    from unspool.evals.text_generator import TextGenerator as TextGenerator
    from unspool.evals.text_generator import TextAnswer as TextAnswer

    # RoPE methods
    from unspool.models.advise_rope import advise_rope as advise_rope
    from unspool.models.advise_rope import RopeAdvice as RopeAdvice
    from unspool.studies.rope_trial.trial import try_rope as try_rope
    from unspool.studies.rope_trial.result import RopeTrial as RopeTrial
    from unspool.rope.methods import ABF as ABF
    from unspool.rope.methods import PI as PI
    from unspool.rope.methods import NTK as NTK
    from unspool.rope.methods import YaRN as YaRN
    from unspool.rope.methods import LongRoPE as LongRoPE
    from unspool.rope.methods import Llama3 as Llama3
    from unspool.rope.harpe import HARPE as HARPE
    from unspool.rope.cope import CoPE as CoPE
    from unspool.rope.drope import DroPE as DroPE

    # Data
    from unspool.recipe.packed_dataset import pack as pack
    from unspool.recipe.packed_dataset import PackedDataset as PackedDataset
    from unspool.training.collator import Collator as Collator
    from unspool.data.strategies.utk import UtK as UtK
    from unspool.data.strategies.cip import CIP as CIP
    from unspool.data.strategies.nextlong import NExtLong as NExtLong
    from unspool.data.strategies.pose import PoSE as PoSE
    from unspool.data.strategies.long_context_gain import LongContextGain as LongContextGain
    from unspool.recipe.document_scorer import long_context_gains as long_context_gains
    from unspool.data.strategies.upsample import Upsample as Upsample

    # Evaluation
    from unspool.reporting.evaluate import evaluate as evaluate
    from unspool.reporting.evaluate import EvalResult as EvalResult
    from unspool.reporting.report import report as report
    from unspool.reporting.report import Report as Report
    from unspool.reporting.judge import judge as judge
    from unspool.reporting.judge import check_judge as check_judge
    from unspool.reporting.judge import JudgeResult as JudgeResult
    from unspool.evals.judge.run import Agreement as Agreement

    # Checks
    from unspool.verification.audits.run import audit as audit
    from unspool.verification.audits.run import AuditResult as AuditResult
    from unspool.verification.verify import verify as verify
    from unspool.verification.verify import VerifyResult as VerifyResult

    # Recipes
    from unspool.planning.make_plan import plan as plan
    from unspool.recipe.run_recipe import run as run
    from unspool.recipe.run_recipe import RunResult as RunResult
    from unspool.recipe.start_job import launch as launch
    from unspool.recipe.start_job import Job as Job
    from unspool.recipe.synthesize import synthesize as synthesize
    from unspool.recipe.synthesize import SynthResult as SynthResult
    from unspool.studies.study import study as study
    from unspool.studies.study import plan_study as plan_study
    from unspool.studies.study import StudyResult as StudyResult
    from unspool.studies.study import StudyPlan as StudyPlan

    # Inspection
    from unspool.inspection.inspect_data import inspect as inspect
    from unspool.inspection.inspect_data import inspect_rows as inspect_rows
    from unspool.inspection.inspect_data import Inspection as Inspection
    from unspool.inspection.inspect_attention import inspect_attention as inspect_attention
    from unspool.inspection.inspect_attention import AttentionView as AttentionView
    from unspool.inspection.inspect_distances import inspect_distances as inspect_distances
    from unspool.inspection.inspect_distances import DistanceView as DistanceView

    # Errors
    from unspool.core.errors import UnspoolError as UnspoolError
    from unspool.core.errors import ConfigError as ConfigError
    from unspool.core.errors import DataError as DataError
