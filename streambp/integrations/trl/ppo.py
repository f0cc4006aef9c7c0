"""`StreamPPOTrainer`: proximal policy optimisation on TRL's current GRPOTrainer; TRL has removed
its own PPO.

GRPOTrainer generates (with transformers or vLLM) and calls the rewards. GRPOTrainer also shuffles
and splits the rollouts into minibatches, and repeats the minibatches for several epochs
(`num_iterations`). This module adds values, rewards per token with a KL penalty, generalised
advantages, and the clipped losses of policy and value.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer
from accelerate.utils import is_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from streambp.errors import ConfigError, StreamBPError
from streambp.integrations.trl.settings import StreamArguments
from streambp.integrations.trl.trainer import StreamedTrainer
from streambp.integrations.trl.values import VALUE_HEAD, VALUE_MODEL, PolicyAndValueHead
from streambp.known_names import GRPO_ONLY_SETTINGS
from streambp.losses.masked import masked_mean
from streambp.losses.ppo import gae, ppo_loss, whiten
from streambp.planner.auto import patch
from streambp.tensors import full_shape

VALUE_FILE = "value.safetensors"


@dataclasses.dataclass
class StreamPPOConfig(StreamArguments, GRPOConfig):  # type: ignore[misc]  # TRL is not typed
    """TRL's `GRPOConfig` with PPO's own fields.

    `num_iterations` (epochs), `epsilon` (clip range) and `entropy_coef` have GRPO's meaning. Fields
    of GRPO's loss alone (`loss_type`, `delta`, ...) are refused. `beta` is named `kl_coef`.

    Args:
        kl_coef: penalty per token on log p_old - log p_ref; 0: no reference model.
        kl_target: target KL, in nats per completion, that kl_coef is adapted to (arXiv 1909.08593,
            section 2.2); None: kl_coef is constant.
        kl_horizon: number of completions over which kl_coef adapts.
        gamma, lam: parameters of generalised advantage estimation.
        value_coef, value_clip_range: weight and clip range of the value loss.
        whiten_advantages: scale advantages to mean 0 and variance 1 over the rollouts of one
            process.
        whiten_rewards: scale rewards to variance 1 over the rollouts of one process, before the KL
            penalty.
    """

    num_generations: int | None = dataclasses.field(
        default=2, metadata={"help": "Completions per prompt."}
    )
    num_iterations: int = dataclasses.field(
        default=4, metadata={"help": "Epochs over each batch of rollouts."}
    )
    kl_coef: float = dataclasses.field(default=0.05, metadata={"help": "KL penalty a token."})
    kl_target: float | None = dataclasses.field(
        default=None, metadata={"help": "KL a completion to steer kl_coef to."}
    )
    kl_horizon: int = dataclasses.field(
        default=10000, metadata={"help": "Completions over which kl_coef is steered."}
    )
    gamma: float = dataclasses.field(default=1.0, metadata={"help": "Discount."})
    lam: float = dataclasses.field(default=0.95, metadata={"help": "GAE's lambda."})
    value_coef: float = dataclasses.field(
        default=0.1, metadata={"help": "Weight of the value loss."}
    )
    value_clip_range: float | None = dataclasses.field(
        default=0.2, metadata={"help": "Clip range of the values."}
    )
    whiten_advantages: bool = dataclasses.field(
        default=True, metadata={"help": "Advantages to mean 0, variance 1."}
    )
    whiten_rewards: bool = dataclasses.field(
        default=False, metadata={"help": "Rewards to variance 1, before the KL penalty."}
    )

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
        ignored = [name for name in GRPO_ONLY_SETTINGS if getattr(self, name) != defaults[name]]
        if ignored or self.beta not in (defaults["beta"], self.kl_coef):
            raise ConfigError(
                f"{', '.join(ignored) or 'beta'} is set, which shapes GRPO's loss and not PPO's. "
                "Leave it out; the clip range is epsilon, the KL penalty kl_coef."
            )
        # TRL loads a reference model and scores rollouts with it if this is not 0
        self.beta: float = self.kl_coef
        super().__post_init__()


class StreamPPOTrainer(StreamedTrainer, GRPOTrainer):  # type: ignore[misc]  # TRL is not typed
    """Trainer for PPO whose policy is patched by streambp and computed chunk by chunk. Arguments
    are those of TRL's `GRPOTrainer`, with `args` a `StreamPPOConfig`.

    Args:
        value_model: a model with one logit per token (`AutoModelForTokenClassification` with
            `num_labels=1`). None: a value head on the policy's own backbone; its gradients reach
            the backbone in the policy's backward.
    """

    trl_module = trl.trainer.grpo_trainer
    head_class = PolicyAndValueHead

    def __init__(self, *args: Any, value_model: nn.Module | None = None, **kwargs: Any) -> None:
        settings = kwargs.get("args") or next(
            (a for a in args if isinstance(a, StreamPPOConfig)), None
        )
        if not isinstance(settings, StreamPPOConfig):
            raise StreamBPError(
                f"args is {type(settings).__name__}; StreamPPOTrainer needs a StreamPPOConfig."
            )
        model = kwargs.get("model", args[0] if args else None)
        in_memory = (
            isinstance(model, nn.Module)
            and not is_peft_model(model)
            and kwargs.get("peft_config") is None
        )
        # TRL would load the reference by path
        settings.beta = 0.0 if in_memory else settings.kl_coef
        super().__init__(*args, **kwargs)
        self.kl_coef = self.beta = settings.beta = settings.kl_coef
        if in_memory and settings.kl_coef != 0.0:
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                raise StreamBPError(
                    "Under DeepSpeed or FSDP the reference model is loaded by path or id; pass one "
                    "as `model`, or kl_coef=0."
                )
            reference = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        policy = self._policy()
        if value_model is not None:
            policy.add_module(VALUE_MODEL, patch(value_model, settings.stream_config()))
        else:
            weight = policy.get_output_embeddings().weight
            dtype = torch.promote_types(weight.dtype, torch.float32)
            size = full_shape(weight)[1]
            # [..., h] -> one value each [..., 1]
            head = nn.Linear(size, 1, device=weight.device, dtype=dtype)
            nn.init.normal_(head.weight, std=1.0 / (size + 1))  # start near zero
            nn.init.zeros_(head.bias)
            policy.add_module(VALUE_HEAD, head)

    def _policy(self) -> Any:
        if is_peft_model(self.model):
            return self.model.get_base_model()
        return self.model

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        # [processes * B, functions]
        self._rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if "pixel_values" in output:
            raise StreamBPError(
                "StreamPPOTrainer trains on text only; these prompts have images. Use "
                "StreamGRPOTrainer."
            )
        mask = self._mask(output)
        with torch.no_grad():
            old = self._score(self.model, output)
        log_probs = output.setdefault("old_per_token_logps", old.log_probs)
        rewards = self._token_rewards(output, log_probs, mask)
        advantages, returns = gae(
            rewards, old.state_values, mask, gamma=self.args.gamma, lam=self.args.lam
        )
        mode = "train" if self.model.training else "eval"
        spread = masked_mean((returns - masked_mean(returns, mask)).square(), mask)
        error = returns - old.state_values
        missed = masked_mean((error - masked_mean(error, mask)).square(), mask)
        self._metrics[mode]["explained_variance"].append(
            (1.0 - missed / spread.clamp(min=1e-8)).item()
        )
        self._metrics[mode]["value"].append(masked_mean(old.state_values, mask).item())
        if self.args.whiten_advantages:
            advantages = whiten(advantages, mask)
        output.update(advantages=advantages, old_values=old.state_values, returns=returns)
        return output

    def _token_rewards(self, output: dict[str, Any], log_probs: Tensor, mask: Tensor) -> Tensor:
        """Return the reward of each token [B, T]: the completion's reward at its last token, minus
        the KL penalty at every token. If there is a penalty, also log the KL divergence and adapt
        `kl_coef`.

        Args:
            output: TRL's generated batch, with the reference model's log-probabilities if there is
                a penalty.
            log_probs: [B, T], the policy's log-probabilities.
            mask: [B, T], true on completion tokens.
        """
        weights = self.reward_weights.to(self._rewards.device)
        first = self.accelerator.process_index * mask.shape[0]
        scores = (self._rewards * weights).nansum(1)[first : first + mask.shape[0]]  # [B]
        rewards = torch.zeros_like(log_probs)
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)  # [B]
        rewards[torch.arange(mask.shape[0], device=mask.device), last] = scores.to(rewards.dtype)
        if self.args.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        if "ref_per_token_logps" in output:
            log_ratios = (log_probs - output["ref_per_token_logps"]).masked_fill(~mask, 0.0)
            rewards = rewards - self.kl_coef * log_ratios
            self._steer(self.accelerator.gather(log_ratios.sum(1)))
        return rewards.masked_fill(~mask, 0.0)

    def _steer(self, divergences: Tensor) -> None:
        """Record the mean KL divergence of a completion for the logs. During training, also change
        `kl_coef` so that the divergence approaches `kl_target`.

        Args:
            divergences: the KL divergence of each completion of all ranks, [completions].
        """
        mode = "train" if self.model.training else "eval"
        mean = divergences.mean().item()
        self._metrics[mode]["kl"].append(mean)
        self._metrics[mode]["kl_coef"].append(self.kl_coef)
        if self.args.kl_target is not None and mode == "train":
            error = min(max(mean / self.args.kl_target - 1.0, -0.2), 0.2)
            self.kl_coef *= 1.0 + error * divergences.numel() / self.args.kl_horizon

    def _mask(self, inputs: dict[str, Any]) -> Tensor:
        mask: Tensor = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            return mask & inputs["tool_mask"].bool()
        return mask

    def _score(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Return the model's output for prompts and completions, reduced to the T completion
        tokens: `log_probs`, `entropy` and `state_values`, [B, T] each. Called once after
        generation, for the old values, and in each step for the loss.

        `state_values` predicts the value of the state before each token.

        Args:
            model: the policy with its value head or value model.
            inputs: TRL's generated batch.
        """
        # [B, prompt + completion]
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        completion_length = inputs["completion_ids"].shape[1]
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-completion_length] = -100
        with self.accelerator.autocast():
            output = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                fused_lm_head=True,
                values=True,
            )
        for name in ("log_probs", "entropy", "state_values"):
            output[name] = output[name][:, -completion_length:]
        return output

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        scored = self._score(model, inputs)
        mask = self._mask(inputs)
        losses = ppo_loss(
            scored.log_probs, inputs["old_per_token_logps"], inputs["advantages"], mask, scored.state_values,
            inputs["old_values"], inputs["returns"], clip_range=self.epsilon_low,
            value_clip_range=self.args.value_clip_range, value_coef=self.args.value_coef, entropy=scored.entropy,
            entropy_coef=self.args.entropy_coef,
        )  # fmt: skip
        for field in dataclasses.fields(losses)[1:]:
            value = self.accelerator.gather(getattr(losses, field.name).detach()).mean().item()
            self._metrics[mode][f"ppo/{field.name}"].append(value)
        return losses.loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Save the policy, and save the value head or value model to a separate file. The policy's
        file then loads like the file of any model."""
        folder = Path(output_dir or self.args.output_dir)
        if state_dict is None:
            state = self.model.state_dict()
        else:
            state = state_dict
        values = {}
        for name, tensor in state.items():
            if {VALUE_HEAD, VALUE_MODEL} & set(name.split(".")):
                values[name] = tensor
        super()._save(
            str(folder), {name: tensor for name, tensor in state.items() if name not in values}
        )
        short = {}
        for name, tensor in values.items():
            short[name[name.index("value_") :]] = tensor.contiguous()
        save_file(short, str(folder / VALUE_FILE), metadata={"kl_coef": repr(self.kl_coef)})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        with safe_open(str(Path(resume_from_checkpoint) / VALUE_FILE), "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            self.kl_coef = float((file.metadata() or {}).get("kl_coef", self.kl_coef))
        keys = self._policy().load_state_dict(state, strict=False)
        if keys.unexpected_keys:
            raise StreamBPError(
                f"{VALUE_FILE} of {resume_from_checkpoint} holds {keys.unexpected_keys[:3]}, "
                "which this trainer does not have; resume with the same value head or value_model "
                "that it was saved with."
            )
