"""What each rule says, in English and in Chinese; braces are numbers and names, which are the same in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from horizon_plugin_pytorch.analysis.profile.document import Advice


class Sentences(NamedTuple):
    """A rule in one language: what is wrong, in a few words; why we think so; what to do."""

    title: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class RuleText:
    """A rule in all languages, by their codes."""

    en: Sentences
    zh: Sentences


def sentences(advice: Advice, language: str = "en") -> Sentences:
    """An advice in a language, with its numbers.

    >>> advice = Advice("never-calibrated", "error", "conv", (), "", "", arguments=(("count", "1"), ("total", "4"),
    ...     ("module", "conv")))
    >>> sentences(advice, "zh").evidence
    '4 个伪量化节点中有 1 个从未见过数据,例如 `conv`:其 scale 仍是初始值 1。'
    """
    text: Sentences = getattr(TEXTS[advice.rule], language)
    arguments = dict(advice.arguments)
    return Sentences(*(part.format(**arguments) for part in text))


TEXTS: dict[str, RuleText] = {
    "left-in-calibration": RuleText(
        Sentences(
            "The model is in the CALIBRATION state",
            "{count} of {total} fake quantizers observe and do not round, such as `{module}`: what is measured is the "
            "float model.",
            "Put the model into the VALIDATION state before you evaluate or compare it.",
        ),
        Sentences(
            "模型处于 CALIBRATION 状态",
            "{total} 个伪量化节点中有 {count} 个只统计、不量化,例如 `{module}`:此时测得的是浮点模型的结果。",
            "评测或对比之前,先将模型切换到 VALIDATION 状态。",
        ),
    ),
    "left-in-train-mode": RuleText(
        Sentences(
            "The model is in train mode",
            "`{module}` ({kind}) of the {which} model computes other numbers in train mode; here both models ran in "
            "eval mode, in your evaluation it would not.",
            "Call eval() before you evaluate, convert or export.",
        ),
        Sentences(
            "模型处于 train 模式",
            "{which} 模型的 `{module}`({kind})在 train 模式下结果不同;本次对比以 eval 模式运行,您的评测则不是。",
            "评测、转换或导出之前先调用 eval()。",
        ),
    ),
    "never-calibrated": RuleText(
        Sentences(
            "Scales that come from no data",
            "{count} of {total} fake quantizers never saw data, such as `{module}`: their scale is the initial 1.",
            "Calibrate with data that reach these modules, or load a calibrated checkpoint.",
        ),
        Sentences(
            "存在未经校准的 scale",
            "{total} 个伪量化节点中有 {count} 个从未见过数据,例如 `{module}`:其 scale 仍是初始值 1。",
            "用能够经过这些模块的数据进行校准,或加载已校准的 checkpoint。",
        ),
    ),
    "range-exceeds-calibration": RuleText(
        Sentences(
            "Values are beyond the calibrated range",
            "Values reach {largest} and the grid ends at {end}: {share} of them are clipped, which costs {error} of "
            "the result.",
            "Calibrate with data like these: more batches, and none chosen by a bias.",
        ),
        Sentences(
            "数值超出校准范围",
            "数值达到 {largest},而量化网格止于 {end}:{share} 的数值被截断,造成 {error} 的误差。",
            "使用与此类似的数据校准:增加批次,避免有偏的选取。",
        ),
    ),
    "input-exceeds-calibration": RuleText(
        Sentences(
            "The input is not like that of the calibration",
            "The input reaches {largest} and the grid of calibration ends at {end}: {share} of it is clipped, which "
            "costs {error}; {others} further operators clip behind it.",
            "Give calibration and evaluation the same preprocessing; if they have it, calibrate with data like these.",
        ),
        Sentences(
            "输入与校准数据不一致",
            "输入达到 {largest},而校准得到的网格止于 {end}:{share} 被截断,误差 {error};其后另有 {others} 个算子截断。",
            "校准与评测应使用相同的预处理;若已相同,请用与此类似的数据校准。",
        ),
    ),
    "range-below-calibration": RuleText(
        Sentences(
            "The calibrated range is far wider than the values",
            "Values reach {largest} and the grid goes to {end}: they use {steps} of its steps, which costs {error}.",
            "Calibrate with data like these.",
        ),
        Sentences(
            "校准范围远大于实际数值",
            "数值只到 {largest},而量化网格到 {end}:仅使用了 {steps} 个量化步长,误差 {error}。",
            "使用与此类似的数据校准。",
        ),
    ),
    "input-below-calibration": RuleText(
        Sentences(
            "The input is far smaller than that of the calibration",
            "The input reaches {largest} and the grid of calibration goes to {end}: it uses {steps} of its steps, "
            "which costs {error}.",
            "Give calibration and evaluation the same preprocessing; if they have it, calibrate with data like these.",
        ),
        Sentences(
            "输入远小于校准数据",
            "输入只到 {largest},而校准得到的网格到 {end}:仅使用了 {steps} 个量化步长,误差 {error}。",
            "校准与评测应使用相同的预处理;若已相同,请用与此类似的数据校准。",
        ),
    ),
    "uneven-batches": RuleText(
        Sentences(
            "Ranges differ between batches, and their mean clips",
            "The widest batch of calibration needed {ratio} times the range that was taken, the mean of the batches "
            "({end}): it is clipped, in int16 as in int8.",
            "Are all batches normalised alike? If they are: larger batches, the observer histogram, or "
            "`auto_calibrate`.",
        ),
        Sentences(
            "批次间范围差异大,取均值造成截断",
            "校准中范围最大的批次需要所取范围(各批均值 {end})的 {ratio} 倍:它被截断,int16 与 int8 均如此。",
            "各批次的归一化是否一致?若一致:增大批次、使用 histogram observer,或使用 `auto_calibrate`。",
        ),
    ),
    "fixed-scale-too-small": RuleText(
        Sentences(
            "A fixed scale is too small",
            "Values reach {largest} and the fixed scale {scale} ends at {end}: {share} of them are clipped, which "
            "costs {error}.",
            "Use a scale of at least {least}, or none.",
        ),
        Sentences(
            "固定 scale 过小",
            "数值达到 {largest},而固定 scale {scale} 止于 {end}:{share} 的数值被截断,误差 {error}。",
            "使用不小于 {least} 的 scale,或不固定 scale。",
        ),
    ),
    "fixed-scale-too-large": RuleText(
        Sentences(
            "A fixed scale is too large",
            "Values reach {largest} and the fixed scale {scale} goes to {end}: they use {steps} of its steps, which "
            "costs {error}.",
            "Use a scale of about {least}, or none.",
        ),
        Sentences(
            "固定 scale 过大",
            "数值只到 {largest},而固定 scale {scale} 到 {end}:仅使用了 {steps} 个量化步长,误差 {error}。",
            "使用约 {least} 的 scale,或不固定 scale。",
        ),
    ),
    "input-not-normalised": RuleText(
        Sentences(
            "The input does not look normalised",
            "The image has values in [{low}, {high}], with a mean of {mean}.",
            "Normalise it to [-1, 1] around 0, for training, calibration and deployment alike, and fix the scale of "
            "its QuantStub.",
        ),
        Sentences(
            "输入似乎未归一化",
            "图像取值在 [{low}, {high}],均值 {mean}。",
            "训练、校准与部署时均以 0 为中心归一化到 [-1, 1],并固定其 QuantStub 的 scale。",
        ),
    ),
    "asymmetric-input": RuleText(
        Sentences(
            "The input is on one side of 0",
            "Values lie in [{low}, {high}]: half of the integers are not used.",
            "Images are centred YUV444 on the chip: normalise to [-1, 1], and fix the scale of the QuantStub.",
        ),
        Sentences(
            "输入偏在 0 的一侧",
            "取值在 [{low}, {high}]:一半的整数没有用到。",
            "芯片上的图像为 centered YUV444:请归一化到 [-1, 1],并固定 QuantStub 的 scale。",
        ),
    ),
    "int8-wide-range": RuleText(
        Sentences(
            "int8 for a wide range",
            "Values reach {largest} in qint8, so one step is {scale}: it costs {error} of the result. Beyond 10, int8 "
            "is rarely enough.",
            "Use int16 here, or bring the range down: batch norm, ReLU6, other units.",
        ),
        Sentences(
            "int8 用于过大的范围",
            "qint8 下数值达到 {largest},一个步长为 {scale}:误差 {error}。范围超过 10 时 int8 通常不够。",
            "此处使用 int16,或缩小范围:BN、ReLU6、改变物理单位。",
        ),
    ),
    "outliers": RuleText(
        Sentences(
            "A few outliers make the grid coarse",
            "99.9 % of the values are within {most} and the largest is {largest}: one step is {scale}, which costs "
            "{error} of the result.",
            "Use int16 here, or an observer that cuts outliers off (percentile, mse).",
        ),
        Sentences(
            "少数离群值使量化网格变粗",
            "99.9 % 的数值在 {most} 以内,而最大值为 {largest}:一个步长为 {scale},误差 {error}。",
            "此处使用 int16,或使用能截断离群值的 observer(percentile、mse)。",
        ),
    ),
    "too-coarse": RuleText(
        Sentences(
            "The task wants more than the format has",
            "The steps of {count} operators cost more than the {limit} that the task allows; those of this one "
            "({format}, {scale}) cost {error}.",
            "Use int16 for these operators.",
        ),
        Sentences(
            "格式的精度不满足任务要求",
            "{count} 个算子的步长误差超过任务允许的 {limit};其中此算子({format},{scale})误差 {error}。",
            "这些算子使用 int16。",
        ),
    ),
    "accumulated-error": RuleText(
        Sentences(
            "Many small errors add up",
            "Rounding to its own steps costs no operator much (`{module}` most, {own}), and the output is wrong by "
            "{error}; the task allows {limit}.",
            "Use int16 for the operators that lose most, or train on the grid; `auto_calibrate` may help too.",
        ),
        Sentences(
            "许多小误差累积",
            "没有单个算子因自身步长的舍入而损失很大(最大的是 `{module}`,{own}),但输出误差为 {error},任务允许 {limit}。",
            "损失最大的算子使用 int16,或进行量化训练;`auto_calibrate` 也可能有帮助。",
        ),
    ),
    "off-centre": RuleText(
        Sentences(
            "Values that vary little around a number far from 0",
            "Its mean is {mean} and its deviation {deviation}, so the grid reaches to {largest}: one step is {scale}, "
            "{error} of what varies.",
            "Subtract the mean, of an input before its QuantStub; if that cannot be, use int16.",
        ),
        Sentences(
            "数值在远离 0 处小幅变化",
            "均值 {mean},标准差 {deviation},网格需到 {largest}:一个步长为 {scale},相当于变化量的 {error}。",
            "减去均值(对输入而言,在 QuantStub 之前);若不可行,使用 int16。",
        ),
    ),
    "unequal-operands": RuleText(
        Sentences(
            "Operands of unequal ranges",
            "`{operand}` reaches {small} and `{other}` {large}; one step of the result is {scale}, so that {steps} "
            "steps are left for the smaller one.",
            "Use int16 for the result, or bring the operands to similar ranges.",
        ),
        Sentences(
            "多输入算子的输入范围差异过大",
            "`{operand}` 只到 {small},而 `{other}` 到 {large};结果的一个步长为 {scale},较小者只剩 {steps} 个步长。",
            "结果使用 int16,或使各输入的范围相近。",
        ),
    ),
    "shared-module": RuleText(
        Sentences(
            "One scale for calls of different ranges",
            "It is called {count} times, with ranges {ranges} and one scale: the smallest call loses {bits} bits, "
            "which costs it {error}.",
            "Give each call a module, or scales, of its own.",
        ),
        Sentences(
            "共享模块各次调用的范围差异过大",
            "共被调用 {count} 次,范围为 {ranges},却只有一个 scale:范围最小的一次损失 {bits} 比特,误差 {error}。",
            "让每次调用使用各自的模块或各自的 scale。",
        ),
    ),
    "steep-table": RuleText(
        Sentences(
            "A function is steep where its input is",
            "The error grows from {before} before `{operator}` to {error} behind it: the steps of `{producer}` "
            "({format}, {scale}) are too coarse for it.",
            "Use int16 for its input, or keep the input away from where the function is steep.",
        ),
        Sentences(
            "函数在输入所在区间过陡",
            "误差由 `{operator}` 之前的 {before} 增至之后的 {error}:`{producer}` 的步长({format},{scale})对它过粗。",
            "其输入使用 int16,或避免输入落入函数的陡峭区间。",
        ),
    ),
    "uneven-channels": RuleText(
        Sentences(
            "Channels of unequal sizes share a scale",
            "The error grows from {before} before `{operator}` to {error} behind it, and {own} is its own rounding: "
            "`{producer}` ({format}, {scale}) rounds parts that matter with a step made for larger ones.",
            "Use int16 for `{producer}`, or `equalize` the float model before you prepare it.",
        ),
        Sentences(
            "大小不一的通道共用一个 scale",
            "误差由 `{operator}` 之前的 {before} 增至之后的 {error},其中 {own} 来自其自身的取整:`{producer}`"
            "({format},{scale})以适合较大通道的步长量化了重要的小通道。",
            "`{producer}` 使用 int16,或在 prepare 之前对浮点模型调用 `equalize`。",
        ),
    ),
    "low-precision-output": RuleText(
        Sentences(
            "An output of the model could be in high precision",
            "It leaves as {format} with a step of {scale}, which costs {error}; the accumulator could leave as it is.",
            "Give this module an output in high precision: a qconfig without activation.",
        ),
        Sentences(
            "模型输出可以使用高精度",
            "输出为 {format},步长 {scale},误差 {error};累加器的结果本可直接输出。",
            "为该模块设置高精度输出,即 qconfig 中不含 activation。",
        ),
    ),
    "output-before-functions": RuleText(
        Sentences(
            "An output of the model could be in high precision",
            "It leaves as {format} with a step of {scale}, which costs {error}; only {between} lies between it and the "
            "DeQuantStub.",
            "Put {between} behind the DeQuantStub; then the module can have an output in high precision.",
        ),
        Sentences(
            "模型输出可以使用高精度",
            "输出为 {format},步长 {scale},误差 {error};它与 DeQuantStub 之间只有 {between}。",
            "将 {between} 移到 DeQuantStub 之后,该模块即可使用高精度输出。",
        ),
    ),
    "shared-output": RuleText(
        Sentences(
            "An output of the model shares its layer with calls that are none",
            "It leaves as {format} with a step of {scale}, which costs {error}; other calls of this module need that "
            "format.",
            "Give the call that is an output a layer of its own, which may share the weight; then it can have high "
            "precision.",
        ),
        Sentences(
            "模型输出与非输出共用一层",
            "输出为 {format},步长 {scale},误差 {error};该模块的其他调用需要此格式。",
            "为作为输出的那次调用单独设置一层(可共享权重),即可使用高精度输出。",
        ),
    ),
    "dead-channels": RuleText(
        Sentences(
            "Channels that are always 0",
            "{dead} of {channels} channels held nothing but zeros in {batches} batches.",
            "Prune them, or train again with a smaller learning rate or weight decay; if other data use them, "
            "calibrate with those.",
        ),
        Sentences(
            "存在恒为 0 的通道",
            "{batches} 个批次中,{channels} 个通道有 {dead} 个始终为 0。",
            "剪去这些通道,或以更小的学习率、weight decay 重新训练;若其他数据会用到它们,请用那些数据校准。",
        ),
    ),
    "weights-far": RuleText(
        Sentences(
            "Training on the grid has moved the weights far from float",
            "{count} of {total} weights differ by more than {limit} from float, `{weight}` by {error}: the two models "
            "are not comparable layer by layer, and may have overfitted.",
            "Use a smaller learning rate and fewer steps; compare float with the calibrated model instead.",
        ),
        Sentences(
            "量化训练使权重远离浮点模型",
            "{total} 个权重中有 {count} 个与浮点相差超过 {limit},`{weight}` 相差 {error}:两模型逐层不可比,可能过拟合。",
            "减小学习率、减少训练步数;改为对比浮点模型与校准模型。",
        ),
    ),
    "sensitive-model": RuleText(
        Sentences(
            "The float model is very sensitive to its inputs",
            "Noise of {noise} on the inputs changes the outputs of the float model by {error}: a sign of overfitting.",
            "Train the float model with more weight decay and data augmentation; int16 helps until then.",
        ),
        Sentences(
            "浮点模型对输入过于敏感",
            "输入加入 {noise} 的噪声,浮点模型的输出就改变 {error}:这是过拟合的迹象。",
            "训练浮点模型时加大 weight decay、增加数据增强;在此之前 int16 会有帮助。",
        ),
    ),
    "not-finite": RuleText(
        Sentences(
            "NaN or infinite values",
            "The {which} model gives {nan} NaN and {inf} infinite values here, and none before.",
            "Look for a division by zero, a logarithm of 0 or an overflow at this line; a mask of -inf belongs into "
            "`masked_fill`.",
        ),
        Sentences(
            "出现 NaN 或无穷",
            "{which} 模型在此处出现 {nan} 个 NaN 与 {inf} 个无穷,此前没有。",
            "检查此行是否有除零、对 0 取对数或溢出;值为 -inf 的 mask 应使用 `masked_fill`。",
        ),
    ),
}  # fmt: skip
