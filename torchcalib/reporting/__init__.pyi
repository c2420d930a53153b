from torchcalib.reporting.html.comparison import save_comparison as save_comparison
from torchcalib.reporting.html.report import save_report as save_report
from torchcalib.reporting.saving import gather_report as gather_report
from torchcalib.reporting.saving import load_report_state as load_report_state
from torchcalib.reporting.saving import save_report_state as save_report_state
