"""Networks of the `transformers` package from small configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.zoo.wrappers import Cached, Decoder, Tokens, Wrapped

Built = tuple[nn.Module, tuple]
ARCHITECTURES: dict[str, Callable[[], Built]] = {}


def architecture(build: Callable[[], Built]) -> Callable[[], Built]:
    """Register an architecture under its function's name."""
    ARCHITECTURES[build.__name__] = build
    return build


def build(name: str) -> Built:
    """An architecture with weights that let numbers of ordinary size through, as training would leave them."""
    model, inputs = ARCHITECTURES[name]()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel() if "embed" not in key and "token" not in key else 4
            nn.init.normal_(parameter, std=fan_in**-0.5)
    _collect_statistics(model, inputs)
    return model.eval(), inputs


def _collect_statistics(model: nn.Module, inputs: tuple) -> None:
    """Running means and variances of data, so that training and evaluation see numbers of the same size."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        norm.train().momentum = 1.0
    if norms:
        with torch.no_grad():
            model(*(torch.randn(16, *x.shape[1:]) for x in inputs))
    for norm in norms:
        norm.momentum = 0.1


def image(size: int = 32, channels: int = 3, batch: int = 2) -> tuple[torch.Tensor]:
    """Pictures of noise."""
    return (torch.randn(batch, channels, size, size),)


def ids(vocabulary: int = 50, length: int = 12) -> tuple[torch.Tensor]:
    """Sentences of noise."""
    return (torch.randint(3, vocabulary, (2, length)),)


SMALL: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
)


@architecture
def resnet() -> Built:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5)
    return Wrapped(hf.ResNetForImageClassification(config)), image()


@architecture
def resnet_bottleneck() -> Built:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=5)
    return Wrapped(hf.ResNetForImageClassification(config)), image()


@architecture
def mobilenet_v1() -> Built:
    config = hf.MobileNetV1Config(depth_multiplier=0.25, min_depth=4, classifier_dropout_prob=0.0, num_labels=5)
    return Wrapped(hf.MobileNetV1ForImageClassification(config)), image(64)


@architecture
def mobilenet_v2() -> Built:
    config = hf.MobileNetV2Config(depth_multiplier=0.25, min_depth=4, classifier_dropout_prob=0.0, num_labels=5)
    return Wrapped(hf.MobileNetV2ForImageClassification(config)), image(64)


@architecture
def regnet() -> Built:
    config = hf.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=5)
    return Wrapped(hf.RegNetForImageClassification(config)), image()


@architecture
def bit() -> Built:
    config = hf.BitConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="preactivation", num_groups=4, num_labels=5
    )
    return Wrapped(hf.BitForImageClassification(config)), image()


@architecture
def efficientnet() -> Built:
    config = hf.EfficientNetConfig(
        width_coefficient=0.25,
        depth_coefficient=0.4,
        hidden_dim=320,
        image_size=32,
        num_labels=5,
    )
    return Wrapped(hf.EfficientNetForImageClassification(config)), image(64)


@architecture
def regnet_x() -> Built:
    config = hf.RegNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4, layer_type="x", num_labels=5
    )
    return Wrapped(hf.RegNetForImageClassification(config)), image()


@architecture
def resnet_d() -> Built:
    config = hf.RTDetrResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], out_indices=[1, 2])
    return Wrapped(hf.RTDetrResNetBackbone(config)), image()


@architecture
def hgnet_v2() -> Built:
    config = hf.HGNetV2Config(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], stem_channels=[3, 8, 8], stage_in_channels=[8, 16],
        stage_mid_channels=[8, 8], stage_out_channels=[16, 32], stage_num_blocks=[1, 2],
        stage_downsample=[False, True], stage_downsample_strides=[2, 2], stage_light_block=[False, True],
        stage_kernel_size=[3, 5], stage_numb_of_layers=[2, 2], use_learnable_affine_block=True, num_labels=5,
    )  # fmt: skip
    return Wrapped(hf.HGNetV2ForImageClassification(config)), image()


@architecture
def pp_lcnet() -> Built:
    blocks = [[[3, 8, 16, 1, False]], [[3, 16, 16, 2, False]], *([[5, 16, 16, 1, True]] for _ in range(3))]
    config = hf.PPLCNetConfig(block_configs=blocks, stem_channels=8, class_expand=32, num_labels=5)
    return Wrapped(hf.PPLCNetForImageClassification(config)), image()


@architecture
def textnet() -> Built:
    config = hf.TextNetConfig(
        stem_out_channels=8, hidden_sizes=[8, 8, 16], conv_layer_kernel_sizes=[[[3, 3], [1, 3]], [[3, 3], [3, 1]]],
        conv_layer_strides=[[1, 2], [2, 1]], num_labels=5,
    )  # fmt: skip
    return Wrapped(hf.TextNetForImageClassification(config)), image()


@architecture
def swiftformer() -> Built:
    config = hf.SwiftFormerConfig(
        depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32], layer_scale_init_value=0.5, drop_path_rate=0.1, num_labels=5
    )
    return Wrapped(hf.SwiftFormerForImageClassification(config)), image(64)


@architecture
def focalnet() -> Built:
    config = hf.FocalNetConfig(
        image_size=32, embed_dim=8, hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
        num_labels=5,
    )  # fmt: skip
    return Wrapped(hf.FocalNetForImageClassification(config)), image()


@architecture
def cvt() -> Built:
    config = hf.CvtConfig(embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3], num_labels=5)
    return Wrapped(hf.CvtForImageClassification(config)), image()


@architecture
def pvt() -> Built:
    config = hf.PvtConfig(
        image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 32, 32], num_attention_heads=[1, 2, 4, 4],
        mlp_ratios=[2, 2, 2, 2], num_labels=5,
    )  # fmt: skip
    return Wrapped(hf.PvtForImageClassification(config)), image(64)


@architecture
def dinov3_convnext() -> Built:
    config = hf.DINOv3ConvNextConfig(
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_scale_init_value=0.5, drop_path_rate=0.1
    )
    return Wrapped(hf.DINOv3ConvNextModel(config)), image()


@architecture
def convnext() -> Built:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, num_labels=5)
    return Wrapped(hf.ConvNextForImageClassification(config)), image()


@architecture
def convnext_v2() -> Built:
    config = hf.ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, num_labels=5)
    return Wrapped(hf.ConvNextV2ForImageClassification(config)), image()


@architecture
def poolformer() -> Built:
    config = hf.PoolFormerConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=5)
    return Wrapped(hf.PoolFormerForImageClassification(config)), image(64)


@architecture
def vit() -> Built:
    return Wrapped(hf.ViTForImageClassification(hf.ViTConfig(**SMALL, num_labels=5))), image()


@architecture
def deit() -> Built:
    return Wrapped(hf.DeiTForImageClassification(hf.DeiTConfig(**SMALL, num_labels=5))), image()


@architecture
def beit() -> Built:
    config = hf.BeitConfig(**SMALL, num_labels=5, use_relative_position_bias=True)
    return Wrapped(hf.BeitForImageClassification(config)), image()


@architecture
def dinov2() -> Built:
    config = hf.Dinov2Config(**SMALL, num_labels=5)
    return Wrapped(hf.Dinov2ForImageClassification(config)), image()


@architecture
def swin() -> Built:
    config = hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return Wrapped(hf.SwinForImageClassification(config)), image()


@architecture
def swin_v2() -> Built:
    config = hf.Swinv2Config(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return Wrapped(hf.Swinv2ForImageClassification(config)), image()


@architecture
def segformer() -> Built:
    config = hf.SegformerConfig(
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
        num_labels=5,
    )
    return Wrapped(hf.SegformerForSemanticSegmentation(config)), image(64)


@architecture
def pvt_v2() -> Built:
    config = hf.PvtV2Config(
        hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], image_size=64, num_labels=5
    )
    return Wrapped(hf.PvtV2ForImageClassification(config)), image(64)


@architecture
def mobilevit() -> Built:
    config = hf.MobileViTConfig(
        hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], image_size=64, num_labels=5
    )
    return Wrapped(hf.MobileViTForImageClassification(config)), image(64)


@architecture
def mobilevit_v2() -> Built:
    config = hf.MobileViTV2Config(width_multiplier=0.25, base_attn_unit_dims=[32, 48, 64], image_size=64, num_labels=5)
    return Wrapped(hf.MobileViTV2ForImageClassification(config)), image(64)


@architecture
def levit() -> Built:
    config = hf.LevitConfig(
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=5,
    )
    return Wrapped(hf.LevitForImageClassification(config)), image(64)


@architecture
def detr() -> Built:
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage4"],
        ),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=6,
        num_labels=5,
    )
    return Wrapped(hf.DetrForObjectDetection(config), outputs=("logits", "pred_boxes")), image(64)


@architecture
def conditional_detr() -> Built:
    config = hf.ConditionalDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage4"],
        ),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=6,
        num_labels=5,
    )
    return Wrapped(hf.ConditionalDetrForObjectDetection(config), outputs=("logits", "pred_boxes")), image(64)


@architecture
def deformable_detr() -> Built:
    config = hf.DeformableDetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        ),
        num_feature_levels=3,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=6,
        num_labels=5,
    )
    return Wrapped(hf.DeformableDetrForObjectDetection(config), outputs=("logits", "pred_boxes")), image(64)


@architecture
def rt_detr() -> Built:
    config = hf.RTDetrConfig(
        backbone_config=hf.RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        ),
        encoder_hidden_dim=32,
        encoder_in_channels=[16, 16, 16],
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        d_model=32,
        decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        num_queries=6,
        num_denoising=0,
        num_labels=5,
    )
    return Wrapped(hf.RTDetrForObjectDetection(config), outputs=("logits", "pred_boxes")), image(64)


@architecture
def yolos() -> Built:
    small = {**SMALL, "image_size": [32, 32]}
    config = hf.YolosConfig(**small, num_detection_tokens=5, num_labels=4)
    return Wrapped(hf.YolosForObjectDetection(config), outputs=("logits", "pred_boxes")), image()


@architecture
def mask2former() -> Built:
    config = hf.Mask2FormerConfig(
        backbone_config=hf.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=2,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
        num_labels=4,
    )
    model = hf.Mask2FormerForUniversalSegmentation(config)
    return Wrapped(model, outputs=("class_queries_logits", "masks_queries_logits")), image(64)


@architecture
def maskformer() -> Built:
    config = hf.MaskFormerConfig(
        fpn_feature_size=32,
        mask_feature_size=32,
        backbone_config=hf.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=2,
        ),
        decoder_config=hf.DetrConfig(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=6,
            num_labels=4,
        ),
        num_labels=4,
    )
    model = hf.MaskFormerForInstanceSegmentation(config)
    return Wrapped(model, outputs=("class_queries_logits", "masks_queries_logits")), image(64)


@architecture
def upernet() -> Built:
    config = hf.UperNetConfig(
        backbone_config=hf.ConvNextConfig(
            hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
        ),
        hidden_size=16,
        pool_scales=[1, 2],
        use_auxiliary_head=False,
        num_labels=5,
    )
    return Wrapped(hf.UperNetForSemanticSegmentation(config)), image(64)


@architecture
def depth_dpt() -> Built:
    config = hf.DPTConfig(
        **{**SMALL, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        is_hybrid=False,
    )
    return Wrapped(hf.DPTForDepthEstimation(config)), image()


@architecture
def clip_vision() -> Built:
    return Wrapped(hf.CLIPVisionModel(hf.CLIPVisionConfig(**SMALL)), outputs=("last_hidden_state",)), image()


@architecture
def videomae() -> Built:
    config = hf.VideoMAEConfig(**SMALL, num_frames=4, tubelet_size=2, num_labels=5)
    return Wrapped(hf.VideoMAEForVideoClassification(config)), (torch.randn(1, 4, 3, 32, 32),)


@architecture
def bert() -> Built:
    config = hf.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50, num_labels=5
    )
    return Tokens(hf.BertForSequenceClassification(config)), ids()


@architecture
def distilbert() -> Built:
    config = hf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=50, num_labels=5)
    return Tokens(hf.DistilBertForSequenceClassification(config)), ids()


@architecture
def gpt2() -> Built:
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32)
    return Tokens(hf.GPT2Model(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def llama() -> Built:
    config = hf.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=50,
    )
    return Tokens(hf.LlamaModel(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def t5_encoder() -> Built:
    config = hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
    return Tokens(hf.T5EncoderModel(config)), ids()


@architecture
def whisper_encoder() -> Built:
    config = hf.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=20,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
    )
    return Wrapped(hf.WhisperModel(config).encoder), (torch.randn(2, 16, 40),)


@architecture
def wav2vec2() -> Built:
    config = hf.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        apply_spec_augment=False,
    )
    return Wrapped(hf.Wav2Vec2Model(config), outputs=("last_hidden_state",)), (torch.randn(2, 400),)


@architecture
def patchtst() -> Built:
    config = hf.PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        stride=8,
        num_hidden_layers=2,
        d_model=16,
        num_attention_heads=2,
        ffn_dim=32,
        prediction_length=8,
    )
    return Wrapped(hf.PatchTSTForPrediction(config), outputs=("prediction_outputs",)), (torch.randn(2, 32, 2),)


TEXT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50
)


@architecture
def siglip_vision() -> Built:
    return Wrapped(hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL)), outputs=("pooler_output",)), image()


@architecture
def dinov3_vit() -> Built:
    config = hf.DINOv3ViTConfig(**SMALL, num_register_tokens=2)
    return Wrapped(hf.DINOv3ViTModel(config), outputs=("last_hidden_state",)), image()


@architecture
def dinov2_registers() -> Built:
    config = hf.Dinov2WithRegistersConfig(**SMALL, num_labels=5)
    return Wrapped(hf.Dinov2WithRegistersForImageClassification(config)), image()


@architecture
def hiera() -> Built:
    config = hf.HieraConfig(
        image_size=[64, 64],
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 4],
        query_stride=[2, 2],
        masked_unit_size=[8, 8],
        patch_stride=[2, 2],
        patch_size=[3, 3],
        patch_padding=[1, 1],
        num_labels=5,
    )
    return Wrapped(hf.HieraForImageClassification(config)), image(64)


@architecture
def vitpose() -> Built:
    backbone = hf.VitPoseBackboneConfig(**{**SMALL, "image_size": [32, 32], "patch_size": [8, 8]}, out_indices=[2])
    return Wrapped(
        hf.VitPoseForPoseEstimation(hf.VitPoseConfig(backbone_config=backbone, num_labels=4)), outputs=("heatmaps",)
    ), image()


@architecture
def sam_vision() -> Built:
    config = hf.SamVisionConfig(
        hidden_size=32,
        output_channels=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        window_size=3,
        global_attn_indexes=[1],
        mlp_dim=64,
    )
    return Wrapped(hf.SamVisionModel(config), outputs=("last_hidden_state",)), image(64)


@architecture
def pixtral_vision() -> Built:
    config = hf.PixtralVisionConfig(**SMALL)
    return Wrapped(hf.PixtralVisionModel(config), outputs=("last_hidden_state",)), image(batch=1)


@architecture
def audio_spectrogram() -> Built:
    config = hf.ASTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=8,
        max_length=32,
        num_mel_bins=16,
        num_labels=5,
        frequency_stride=4,
        time_stride=4,
    )
    return Wrapped(hf.ASTForAudioClassification(config)), (torch.randn(2, 32, 16),)


@architecture
def timesformer() -> Built:
    config = hf.TimesformerConfig(**SMALL, num_frames=2, num_labels=5)
    return Wrapped(hf.TimesformerForVideoClassification(config)), (torch.randn(1, 2, 3, 32, 32),)


@architecture
def roberta() -> Built:
    return Tokens(hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, num_labels=5))), ids()


@architecture
def albert() -> Built:
    config = hf.AlbertConfig(**TEXT, embedding_size=16, num_labels=5)
    return Tokens(hf.AlbertForSequenceClassification(config)), ids()


@architecture
def electra() -> Built:
    config = hf.ElectraConfig(**TEXT, embedding_size=16, num_labels=5)
    return Tokens(hf.ElectraForSequenceClassification(config)), ids()


@architecture
def mobilebert() -> Built:
    config = hf.MobileBertConfig(**TEXT, embedding_size=16, intra_bottleneck_size=32, num_labels=5)
    return Tokens(hf.MobileBertForSequenceClassification(config)), ids()


@architecture
def deberta_v2() -> Built:
    config = hf.DebertaV2Config(**TEXT, num_labels=5, relative_attention=True, pos_att_type=["c2p", "p2c"])
    return Tokens(hf.DebertaV2ForSequenceClassification(config)), ids()


@architecture
def qwen2() -> Built:
    config = hf.Qwen2Config(**TEXT, num_key_value_heads=2)
    return Tokens(hf.Qwen2Model(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def qwen3() -> Built:
    config = hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8)
    return Tokens(hf.Qwen3Model(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def gemma() -> Built:
    config = hf.GemmaConfig(**TEXT, num_key_value_heads=1, head_dim=8)
    return Tokens(hf.GemmaModel(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def opt() -> Built:
    config = hf.OPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        vocab_size=50,
        word_embed_proj_dim=32,
        max_position_embeddings=32,
    )
    return Tokens(hf.OPTModel(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def phi() -> Built:
    config = hf.PhiConfig(**TEXT)
    return Tokens(hf.PhiModel(config), outputs=("last_hidden_state",), use_cache=False), ids()


@architecture
def hubert() -> Built:
    config = hf.HubertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        apply_spec_augment=False,
    )
    return Wrapped(hf.HubertModel(config), outputs=("last_hidden_state",)), (torch.randn(2, 400),)


@architecture
def t5_decoder() -> Built:
    config = hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
    return Decoder(hf.T5Model(config).decoder), (*ids(), torch.randn(2, 6, 32))


@architecture
def whisper_decoder() -> Built:
    config = hf.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=2,
        vocab_size=50,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        max_target_positions=32,
        pad_token_id=0,
    )
    return Decoder(hf.WhisperModel(config).decoder), (*ids(), torch.randn(2, 6, 32))


def earlier(heads: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of two layers, in one range: the line of the cache that joins them has one scale."""
    return tuple(torch.randn(2, heads, 6, 8).clamp(-2, 2) for _ in range(4))


@architecture
def llama_with_cache() -> Built:
    config = hf.LlamaConfig(**TEXT, num_key_value_heads=2)
    past = earlier(2)
    return Cached(hf.LlamaModel(config)), (torch.randint(3, 50, (2, 1)), *past)


@architecture
def gpt2_with_cache() -> Built:
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=32)
    past = earlier(4)
    return Cached(hf.GPT2Model(config)), (torch.randint(3, 50, (2, 1)), *past)


@architecture
def table_transformer() -> Built:
    config = hf.TableTransformerConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage4"],
        ),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=6,
        num_labels=5,
    )
    return Wrapped(hf.TableTransformerForObjectDetection(config), outputs=("logits", "pred_boxes")), image(64)


@architecture
def depth_anything() -> Built:
    config = hf.DepthAnythingConfig(
        backbone_config=hf.Dinov2Config(
            **{**SMALL, "num_hidden_layers": 4},
            out_features=["stage1", "stage2", "stage3", "stage4"],
            reshape_hidden_states=False,
            apply_layernorm=True,
        ),
        patch_size=8,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    return Wrapped(hf.DepthAnythingForDepthEstimation(config)), image()


@architecture
def glpn() -> Built:
    config = hf.GLPNConfig(
        hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16
    )
    return Wrapped(hf.GLPNForDepthEstimation(config)), image(64)


@architecture
def owlvit_vision() -> Built:
    return Wrapped(hf.OwlViTVisionModel(hf.OwlViTVisionConfig(**SMALL)), outputs=("last_hidden_state",)), image()


@architecture
def oneformer_pixels() -> Built:
    config = hf.OneFormerConfig(
        backbone_config=hf.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=2,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        conv_dim=32,
        mask_dim=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
    )
    return Wrapped(hf.OneFormerModel(config).pixel_level_module), image(64)
