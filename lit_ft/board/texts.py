"""All texts of the board in English and Chinese."""

from collections.abc import Mapping

LANGUAGES = ("en", "zh")
COOKIE = "lit_ft_language"

TEXTS: dict[str, tuple[str, str]] = {
    # --- frame and start page
    "board": ("Board", "面板"),
    "runs": ("Runs", "训练"),
    "new run": ("New run", "新建训练"),
    "no runs": ("There is no run yet in {folders}.", "{folders} 中还没有训练。"),
    "run": ("run", "训练"),
    "state": ("state", "状态"),
    "step": ("step", "步数"),
    "loss": ("train loss", "训练损失"),
    "val loss": ("val loss", "验证损失"),
    "changed": ("last change", "最近变化"),
    "starting": ("starting", "启动中"),
    "running": ("running", "训练中"),
    "finished": ("finished", "已完成"),
    "failed": ("failed", "失败"),
    "stopped": ("stopped", "已停止"),
    "seconds ago": ("{} s ago", "{} 秒前"),
    "minutes ago": ("{} min ago", "{} 分钟前"),
    "hours ago": ("{} h ago", "{} 小时前"),
    "days ago": ("{} days ago", "{} 天前"),
    "of": ("{} of {}", "{} / {}"),
    # --- new run
    "recipe": ("Recipe", "配方"),
    "empty": ("(empty)", "（空白）"),
    "choose recipe": ("Begin with", "从此配方开始"),
    "fragments": ("On top of it, in the order chosen", "在其上叠加（按选择顺序）"),
    "name": ("Name of the run", "训练名称"),
    "loading": ("Reading the options ...", "正在读取选项……"),
    "group model": ("Model", "模型"),
    "group method": ("Method", "微调方法"),
    "group data": ("Data", "数据"),
    "group batch": ("Batch and device", "批次与设备"),
    "group optimizer": ("Optimizer", "优化器"),
    "group length": ("Length of training", "训练时长"),
    "group watch": ("Record while training", "训练时记录"),
    "lit_callbacks.MemoryProfiler": ("Memory curve", "内存曲线"),
    "lit_callbacks.LossLedger": ("Loss of each sample, for the report", "每个样本的损失（用于报告）"),
    "lit_callbacks.SampleGenerations": (
        "Questions to answer while it trains, one per line",
        "训练中回答的问题，每行一个",
    ),
    "other options": ("All other options", "所有其他选项"),
    "find option": ("Find an option by name", "按名称查找选项"),
    "value": ("Value, as in YAML", "取值（YAML 写法）"),
    "set": ("Set", "设置"),
    "remove": ("Remove", "移除"),
    "full": ("full fine-tuning", "全参数微调"),
    "none": ("none", "无"),
    "default": ("default", "默认"),
    "default value": ("default: {}", "默认：{}"),
    "yaml": ("YAML", "YAML"),
    "command": ("Command", "命令"),
    "saved recipe": (
        "Options cannot say all of it: the recipe is saved as a file.",
        "部分内容无法写成选项：配方将保存为文件。",
    ),
    "copy": ("Copy", "复制"),
    "copied": ("Copied", "已复制"),
    "check": ("Check", "检查"),
    "checking": ("Checking the data ...", "正在检查数据……"),
    "checked": ("Data check", "数据检查"),
    "start": ("Start training", "开始训练"),
    "bad name": (
        "The name {!r} must begin with a letter or digit; then letters, digits, dots, dashes and underscores.",
        "名称 {!r} 须以字母或数字开头，其后为字母、数字、点、短横或下划线。",
    ),
    # --- page of a run
    "stop": ("Stop", "停止"),
    "stop now": ("Stop this run? What it has trained so far is saved.", "停止该训练？已训练的部分会保存。"),
    "stopping": ("Stopping: what it has trained so far is saved.", "正在停止：保存已训练的部分。"),
    "gone": ("{} is not there any more: deleted or moved.", "{} 已不存在：已被删除或移走。"),
    "cancel": ("Cancel", "取消"),
    "resume": ("Resume", "继续训练"),
    "resumed": ("Resumed", "已继续"),
    "write report": ("Write report", "生成报告"),
    "report": ("Report", "报告"),
    "curves": ("Curves", "曲线"),
    "samples": ("Samples", "样例"),
    "console": ("Console", "控制台"),
    "chat": ("Chat", "对话"),
    "export": ("Export", "导出"),
    "no metrics": ("Nothing is logged yet.", "还没有记录。"),
    "no samples": (
        "No samples: add lit_callbacks.SampleGenerations or lit_ft.ExactMatch to trainer.callbacks.",
        "没有样例：请在 trainer.callbacks 中加入 lit_callbacks.SampleGenerations 或 lit_ft.ExactMatch。",
    ),
    "expected": ("expected: {}", "应为：{}"),
    "no log": (
        "This run was started elsewhere; its output is where it was started.",
        "该训练由其他进程启动，输出在启动它的地方。",
    ),
    "chart loss": ("loss", "损失"),
    "chart rate": ("learning rate", "学习率"),
    "chart speed": ("tokens per second", "每秒 token 数"),
    "chart memory": ("memory, MiB", "内存（MiB）"),
    "chart other": ("another metric", "其他指标"),
    "speed": ("tokens per second", "每秒 token 数"),
    "memory": ("peak memory", "内存峰值"),
    "time": ("time", "用时"),
    "folder": ("Folder", "文件夹"),
    # --- chat
    "open chat": ("Load the model", "加载模型"),
    "close chat": ("Unload the model", "卸载模型"),
    "chat note": (
        "A server of its own answers with the base and the adapter side by side; it ends with the board.",
        "由单独的服务进程回答，基座与适配器并排显示；面板关闭时一并结束。",
    ),
    "no checkpoint": ("The run has no checkpoint yet.", "该训练还没有检查点。"),
    "loading model": ("Loading the model ...", "正在加载模型……"),
    "truncated": ("cut at the longest answer", "达到最大长度"),
    "message": ("Message", "消息"),
    "send": ("Send", "发送"),
    "stop answer": ("Stop the answer", "停止回答"),
    "clear": ("New conversation", "新对话"),
    "sampling": ("Sampling", "采样"),
    "system": ("System prompt", "系统提示"),
    "temperature": ("Temperature", "温度"),
    "top_p": ("Top p", "Top p"),
    "max_tokens": ("Longest answer, tokens", "回答最大长度（token）"),
    "seed": ("Seed", "随机种子"),
    "bad number": ("{}: {!r} is no number; correct it, or leave it empty", "{}：{!r} 不是数字；请改正或留空"),
    # --- export
    "export merged": ("Merged model", "合并后的模型"),
    "export adapter": ("Adapter alone", "仅适配器"),
    "checkpoint": ("Checkpoint", "检查点"),
    "dtype": ("dtype", "数据类型"),
    "quantized base": ("Quantized base", "量化基座"),
    "export now": ("Export", "导出"),
    "ended": ("ended with exit code {}", "已结束，退出码 {}"),
    "language": ("中文", "English"),
    "help": ("All options have their help: python -m lit_ft fit --help", "所有选项的说明：python -m lit_ft fit --help"),
}
"""English and Chinese of each text."""


class Texts:
    """Texts in one language; called with the name of a text and the values for its braces."""

    def __init__(self, language: str) -> None:
        """Set the language.

        Args:
            language: ``en`` or ``zh``.
        """
        self.language = language
        self._column = LANGUAGES.index(language)

    def __call__(self, name: str, *values: object, **named: object) -> str:
        """Text by its name."""
        return TEXTS[name][self._column].format(*values, **named)


def language_of(cookies: Mapping[str, str], accepted: str) -> str:
    """Language of a request: the one that was chosen, else the first of the browser's that there is, else English.

    Args:
        cookies: the request's cookies.
        accepted: its header ``Accept-Language``, in the browser's order.
    """
    if (chosen := cookies.get(COOKIE)) in LANGUAGES:
        return str(chosen)
    languages = [part.split(";")[0].strip().lower().split("-")[0] for part in accepted.split(",")]
    return next((one for one in languages if one in LANGUAGES), "en")
