// The Python module _core: submit, cancel, poll, stats, shutdown. No call crashes the interpreter, whatever
// it is given; the GIL is released wherever a call may wait.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "batching/engine.h"
#include "bindings/options_from_dict.h"
#include "bindings/program_from_dict.h"
#include "bindings/python_value.h"
#include "bindings/stats_to_dict.h"
#include "bindings/weights_file.h"
#include "bindings/without_gil.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/probe.h"
#include "device/device.h"
#include "device/host/cpu.h"
#include "speculation/draft_model.h"
#include "speculation/lookup_drafter.h"

#ifndef CASTIRON_VERSION
#define CASTIRON_VERSION "0.1.0"
#endif

namespace castiron::bindings {
namespace {

using namespace nb::literals;
using Prompt = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A timeout that C++ can represent; NaN becomes 0.
std::chrono::duration<double> seconds_from(double timeout) {
    constexpr double kLongest = 3600;
    return std::chrono::duration<double>(timeout > 0 ? std::min(timeout, kLongest) : 0.0);
}

// An engine and what stats() says about its memory.
struct PyEngine {
    PyEngine() = default;
    PyEngine(PyEngine&&) = default;
    ~PyEngine() {
        // A device that hangs must not keep the interpreter from ending: its engine is left where it is.
        if (engine != nullptr && !engine->shutdown()) static_cast<void>(engine.release());
    }

    std::unique_ptr<Engine> engine;
    StaticStats fixed;
};

// The model that guesses tokens: {program, weights_path, tensors}, for the CPU.
std::unique_ptr<Drafter> make_draft_model(nb::handle dict, const Options& options) {
    Fields fields(dict, "draft");
    auto program = std::make_shared<Program>(program_from_dict(fields.required("program"), nb::none()));
    const WeightsFile weights(as_string(fields.required("weights_path"), fields.path("weights_path")));
    weights.attach(*program, fields.required("tensors"));
    fields.finish({"program", "weights_path", "tensors"});
    if (program->target != "host") {
        throw std::invalid_argument("the draft engine's program is for \"" + program->target +
                                    "\"; expected \"host\"");
    }
    Limits limits = program->limits;
    if (options.engine.max_batch_size > 0) {
        limits.max_batch_size = std::min(limits.max_batch_size, options.engine.max_batch_size);
    }
    const WithoutGil unlocked;
    const int most = options.engine.vocab_limit > 0 ? options.engine.vocab_limit : program->vocab_size;
    return std::make_unique<DraftModel>(make_host_device(program, options.host), limits, program->vocab_size,
                                        std::min(most, program->vocab_size), options.num_speculative_tokens);
}

// Who guesses tokens; nobody where neither the options nor `draft` name one.
std::unique_ptr<Drafter> make_drafter(nb::handle draft, const Options& options) {
    if (draft.is_none()) {
        if (!options.lookup) return nullptr;
        return std::make_unique<LookupDrafter>(*options.lookup, options.num_speculative_tokens);
    }
    if (options.lookup) {
        throw std::invalid_argument("speculative_decoding and a draft engine both guess tokens; give one");
    }
    return make_draft_model(draft, options);
}

void make_engine(PyEngine* self, nb::handle program_dict, const std::string& weights_path, nb::handle tensors,
                 nb::handle options_dict, nb::handle draft) {
    const Options options = options_from_dict(options_dict);
    std::unique_ptr<Drafter> drafter = make_drafter(draft, options);
    auto program = std::make_shared<Program>(program_from_dict(program_dict, options.kernel_images));
    const bool cuda = program->target.rfind("sm_", 0) == 0 || program->target.rfind("compute_", 0) == 0;
    if (!cuda && program->target != "host") {
        throw std::invalid_argument("the program is for target \"" + program->target +
                                    "\"; this runtime runs \"host\", \"sm_...\" and \"compute_...\"");
    }
    auto made = std::make_unique<PyEngine>();
    {
        const WeightsFile weights(weights_path);
        weights.attach(*program, tensors);
        const WithoutGil unlocked;
        std::unique_ptr<Device> device;
        const CudaDevice* on_gpu = nullptr;
        if (cuda) {
            auto made_device = make_cuda_device(program, options.cuda);
            on_gpu = made_device.get();
            device = std::move(made_device);
        } else {
            device = make_host_device(program, options.host);
            made->fixed.isa = host::isa_name(host::choose_isa(options.host.isa));
            made->fixed.num_threads =
                options.host.num_threads > 0 ? options.host.num_threads : host::usable_cpus();
        }
        made->fixed.target = program->target;
        made->fixed.arena_bytes = program->arena_bytes;
        for (Weight& weight : program->weights) {
            made->fixed.weights_bytes += weight.bytes;
            weight.data = nullptr;  // the device has its copy, and the mapping ends here
        }
        const KvShape shape{device->kv_block_bytes(), device->kv_window_group().block_bytes, {}};
        made->engine = std::make_unique<Engine>(std::move(device), program->limits, program->vocab_size,
                                                options.engine, std::move(drafter));
        made->fixed.kv_shape = shape;
        made->fixed.kv_bytes = bytes_of(made->engine->pool_size(), shape);
        if (on_gpu != nullptr) made->fixed.cuda = on_gpu->facts();  // the engine owns it; graphs are captured
    }
    new (self) PyEngine(std::move(*made));
}

// cache_salt: 16 bytes, a digest of the salt; or none.
RequestId submit(PyEngine& self, const Prompt& prompt, const SamplingParams& params, int32_t priority,
                 const nb::bytes& cache_salt, AdapterId adapter) {
    const std::span<const int32_t> tokens(prompt.data(), prompt.size());
    RequestOptions options{priority, {}, adapter};
    uint64_t digest[2];
    if (cache_salt.size() == sizeof(digest)) {
        std::memcpy(digest, cache_salt.data(), sizeof(digest));
        options.cache_salt = {digest[0], digest[1]};
    } else if (cache_salt.size() != 0) {
        throw std::invalid_argument("cache_salt has " + std::to_string(cache_salt.size()) +
                                    " bytes; expected 16 or none");
    }
    const WithoutGil unlocked;  // it copies the prompt, and the engine's lock may be taken
    return self.engine->submit(tokens, params, options);
}

// modules: path in the source model -> (a [rank, inputs], b [outputs, rank], scale).
AdapterId add_adapter(PyEngine& self, const std::map<std::string, std::tuple<Matrix, Matrix, float>>& given) {
    LoraModules modules;
    for (const auto& [name, pair] : given) {
        const auto& [a, b, scale] = pair;
        if (a.shape(0) != b.shape(1)) {
            throw std::invalid_argument("module \"" + name + "\": a has rank " + std::to_string(a.shape(0)) +
                                        ", b " + std::to_string(b.shape(1)));
        }
        modules[name] = {{a.data(), a.size()},
                         {b.data(), b.size()},
                         static_cast<int64_t>(a.shape(0)),
                         static_cast<int64_t>(a.shape(1)),
                         static_cast<int64_t>(b.shape(0)),
                         scale};
    }
    const WithoutGil unlocked;  // `given` keeps the arrays
    return self.engine->add_adapter(modules);
}

std::vector<Event> poll(PyEngine& self, double timeout) {
    const WithoutGil unlocked;
    return self.engine->poll(seconds_from(timeout));
}

std::optional<int32_t> token_or_none(int32_t token) {
    return token < 0 ? std::nullopt : std::optional(token);
}

constexpr std::pair<const char*, EarlyStopping> kEarlyStopping[] = {
    {"never", EarlyStopping::kNever},
    {"likely", EarlyStopping::kLikely},
    {"first_finished", EarlyStopping::kFirstFinished},
};

std::string early_stopping_name(const SamplingParams& params) {
    for (const auto& [name, meaning] : kEarlyStopping) {
        if (meaning == params.early_stopping) return name;
    }
    return "";
}

void set_early_stopping(SamplingParams& params, const std::string& found) {
    for (const auto& [name, meaning] : kEarlyStopping) {
        if (found == name) {
            params.early_stopping = meaning;
            return;
        }
    }
    throw std::invalid_argument("early_stopping is \"" + found +
                                "\"; expected \"never\", \"likely\" or \"first_finished\"");
}

// Logits [rows, vocab_size] as an array that keeps them alive; None where there are none.
nb::object logit_rows(const std::shared_ptr<float[]>& logits, int rows, int vocab_size) {
    if (logits == nullptr) return nb::none();
    using Owner = std::shared_ptr<float[]>;
    auto keep = std::make_unique<Owner>(logits);
    const nb::capsule owner(keep.get(), [](void* data) noexcept { delete static_cast<Owner*>(data); });
    static_cast<void>(keep.release());  // the capsule's from here on
    const size_t shape[] = {static_cast<size_t>(rows), static_cast<size_t>(vocab_size)};
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(logits.get(), 2, shape, owner));
}

nb::dict cpu_features() {
    nb::dict features;
    for (const host::Isa isa : host::kAllIsas) {
        features[std::string(host::isa_name(isa)).c_str()] = host::cpu_supports(isa);
    }
    features["isa"] = std::string(host::isa_name(host::choose_isa("")));
    features["cpus"] = host::usable_cpus();
    return features;
}

nb::dict cuda_probe() {
    cuda::Probe found;
    {
        const WithoutGil unlocked;  // the driver may take seconds to start
        found = cuda::probe();
    }
    nb::list devices;
    for (const cuda::Gpu& gpu : found.gpus) {
        nb::dict device;
        device["index"] = gpu.index;
        device["name"] = gpu.name;
        device["compute_capability"] = gpu.compute_capability;
        device["total_memory"] = gpu.total_memory;
        device["multiprocessors"] = gpu.multiprocessors;
        devices.append(device);
    }
    nb::dict result;
    result["driver"] = found.driver;
    result["error"] = found.error;
    result["devices"] = devices;
    return result;
}

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // an engine kept alive until the interpreter ends is no fault
    m.doc() = "castiron's C++ runtime.";
    m.attr("__version__") = CASTIRON_VERSION;
    m.def("cpu_features", &cpu_features, "What this CPU can run, as found at run time.");
    m.def("cuda_probe", &cuda_probe, "The NVIDIA GPUs of this machine, or why there are none.");
    nb::exception<QueueFullError>(m, "QueueFullError", PyExc_RuntimeError);
    nb::exception<EngineDeadError>(m, "EngineDeadError", PyExc_RuntimeError);

    nb::class_<SamplingParams>(m, "SamplingParams")
        .def(nb::init<>())
        .def_rw("max_tokens", &SamplingParams::max_tokens)
        .def_rw("min_tokens", &SamplingParams::min_tokens)
        .def_rw("temperature", &SamplingParams::temperature)
        .def_rw("top_k", &SamplingParams::top_k)
        .def_rw("top_p", &SamplingParams::top_p)
        .def_rw("top_p_decay", &SamplingParams::top_p_decay)
        .def_rw("top_p_min", &SamplingParams::top_p_min)
        .def_rw("top_p_reset_ids", &SamplingParams::top_p_reset_ids)
        .def_rw("min_p", &SamplingParams::min_p)
        .def_rw("typical_p", &SamplingParams::typical_p)
        .def_rw("repetition_penalty", &SamplingParams::repetition_penalty)
        .def_rw("presence_penalty", &SamplingParams::presence_penalty)
        .def_rw("frequency_penalty", &SamplingParams::frequency_penalty)
        .def_rw("seed", &SamplingParams::seed, nb::for_setter(nb::arg("seed").none()))
        .def_rw("stop_token_ids", &SamplingParams::stop_token_ids)
        .def_prop_rw(
            "first_mask", [](const SamplingParams& self) { return self.first_mask; },
            [](SamplingParams& self, const Mask& mask) {
                self.first_mask.assign(mask.data(), mask.data() + mask.size());
            },
            nb::for_setter(nb::arg("mask").noconvert()))
        .def_prop_rw(
            "allowed_token_ids", [](const SamplingParams& self) { return self.rules.allowed; },
            [](SamplingParams& self, std::vector<int32_t> ids) { self.rules.allowed = std::move(ids); })
        .def_prop_rw(
            "bad_words", [](const SamplingParams& self) { return self.rules.bad_words; },
            [](SamplingParams& self, std::vector<std::vector<int32_t>> words) {
                self.rules.bad_words = std::move(words);
            })
        .def_prop_rw(
            "no_repeat_ngram_size", [](const SamplingParams& self) { return self.rules.no_repeat_ngram; },
            [](SamplingParams& self, int size) { self.rules.no_repeat_ngram = size; })
        .def_prop_rw(
            "logit_bias",
            [](const SamplingParams& self) {
                std::map<int32_t, float> bias;
                for (const TokenBias& entry : self.rules.bias) bias[entry.token] = entry.bias;
                return bias;
            },
            [](SamplingParams& self, const std::map<int32_t, float>& bias) {
                self.rules.bias.clear();
                for (const auto& [token, value] : bias) self.rules.bias.push_back({token, value});
            })
        .def_rw("logprobs", &SamplingParams::logprobs)
        .def_rw("prompt_logprobs", &SamplingParams::prompt_logprobs)
        .def_rw("process_logits", &SamplingParams::process_logits)
        .def_rw("beam_width", &SamplingParams::beam_width)
        .def_rw("length_penalty", &SamplingParams::length_penalty)
        .def_prop_rw("early_stopping", &early_stopping_name, &set_early_stopping)
        .def_rw("num_speculative_tokens", &SamplingParams::num_speculative_tokens)
        .def_rw("context_logits", &SamplingParams::context_logits)
        .def_rw("generation_logits", &SamplingParams::generation_logits);

    nb::class_<TokenLogprobs>(m, "TokenLogprobs")
        .def_ro("token_id", &TokenLogprobs::token)
        .def_ro("logprob", &TokenLogprobs::logprob)
        .def_prop_ro("top", [](const TokenLogprobs& self) {
            nb::list top;
            for (const TokenLogprob& entry : self.top) top.append(nb::make_tuple(entry.token, entry.logprob));
            return top;
        });

    nb::class_<BeamOutput>(m, "BeamOutput")
        .def_ro("token_ids", &BeamOutput::token_ids)
        .def_ro("logprobs", &BeamOutput::logprobs)
        .def_ro("cumulative_logprob", &BeamOutput::cumulative_logprob)
        .def_ro("score", &BeamOutput::score)
        .def_prop_ro("stop_token_id",
                     [](const BeamOutput& self) { return token_or_none(self.stop_token_id); });

    nb::class_<Event>(m, "Event")
        .def_ro("request_id", &Event::request_id)
        .def_ro("token_ids", &Event::token_ids)
        .def_ro("logprobs", &Event::logprobs)
        .def_ro("finished", &Event::finished)
        .def_prop_ro("finish_reason", [](const Event& self) { return to_string(self.finish_reason); })
        .def_prop_ro("stop_token_id", [](const Event& self) { return token_or_none(self.stop_token_id); })
        .def_ro("beams", &Event::beams)
        .def_ro("error", &Event::error)
        .def_ro("prompt_tokens", &Event::prompt_tokens)
        .def_ro("cached_tokens", &Event::cached_tokens)
        .def_ro("queue_seconds", &Event::queue_seconds)
        .def_ro("first_token_seconds", &Event::first_token_seconds)
        .def_ro("seconds", &Event::seconds)
        .def_ro("prompt_logprobs", &Event::prompt_logprobs)
        .def_prop_ro("context_logits",
                     [](const Event& self) {
                         return logit_rows(self.context_logits, self.prompt_tokens, self.vocab_size);
                     })
        .def_prop_ro("generation_logits", [](const Event& self) {
            return logit_rows(self.generation_logits, self.num_output, self.vocab_size);
        });

    nb::class_<MaskWish>(m, "MaskWish")
        .def_ro("request_id", &MaskWish::request_id)
        .def_ro("num_output", &MaskWish::num_output)
        .def_ro("tokens", &MaskWish::tokens)
        .def_ro("drafts", &MaskWish::drafts);

    nb::class_<LogitsWish>(m, "LogitsWish")
        .def_ro("num_output", &LogitsWish::num_output)
        .def_ro("tokens", &LogitsWish::tokens)
        .def_prop_ro("logits", [](nb::handle self) {
            auto& logits = nb::cast<LogitsWish&>(self).logits;
            const size_t shape[] = {logits.size()};
            return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<1>>(logits.data(), 1, shape, self));
        });

    nb::class_<PyEngine>(m, "Engine")
        .def("__init__", &make_engine, "program"_a, "weights_path"_a, "tensors"_a, "options"_a,
             nb::arg("draft") = nb::none())
        .def("submit", &submit, nb::arg("prompt").noconvert(), "params"_a, "priority"_a = 0,
             "cache_salt"_a = nb::bytes("", 0), "adapter"_a = 0)
        .def("add_adapter", &add_adapter, "modules"_a)
        .def(
            "remove_adapter", [](PyEngine& self, AdapterId id) { self.engine->remove_adapter(id); },
            "adapter"_a, nb::call_guard<WithoutGil>())
        .def(
            "cancel", [](PyEngine& self, RequestId id) { self.engine->cancel(id); }, "request_id"_a,
            nb::call_guard<WithoutGil>())
        .def("poll", &poll, "timeout"_a)
        .def(
            "poll_masks",
            [](PyEngine& self, double timeout) {
                const WithoutGil unlocked;
                return self.engine->masks().poll(seconds_from(timeout));
            },
            "timeout"_a)
        .def(
            "give_masks",
            [](PyEngine& self, RequestId id, int num_output, int num_drafts, const Masks& masks) {
                const MaskRows rows{{masks.data(), masks.size()}, masks.shape(0)};
                const WithoutGil unlocked;
                self.engine->masks().give(id, num_output, num_drafts, rows);
            },
            "request_id"_a, "num_output"_a, "num_drafts"_a, nb::arg("masks").noconvert())
        .def(
            "refuse_mask",
            [](PyEngine& self, RequestId id, int num_output, const std::string& reason) {
                self.engine->masks().refuse(id, num_output, reason);
            },
            "request_id"_a, "num_output"_a, "reason"_a, nb::call_guard<WithoutGil>())
        .def(
            "poll_logits", [](PyEngine& self, RequestId id) { return self.engine->processors().poll(id); },
            "request_id"_a, nb::call_guard<WithoutGil>())
        .def(
            "give_logits",
            [](PyEngine& self, RequestId id, int num_output, const Row& logits) {
                const std::span<const float> row(logits.data(), logits.size());
                const WithoutGil unlocked;
                self.engine->processors().give(id, num_output, row);
            },
            "request_id"_a, "num_output"_a, nb::arg("logits").noconvert())
        .def(
            "refuse_logits",
            [](PyEngine& self, RequestId id, int num_output, const std::string& reason) {
                self.engine->processors().refuse(id, num_output, reason);
            },
            "request_id"_a, "num_output"_a, "reason"_a, nb::call_guard<WithoutGil>())
        .def(
            "stats",
            [](PyEngine& self, size_t recent_steps) {
                EngineStats stats;
                {
                    const WithoutGil unlocked;
                    stats = self.engine->stats(recent_steps);
                }
                return stats_to_dict(stats, self.engine->limits(), self.engine->pool_size(), self.fixed);
            },
            "recent_steps"_a = 0)
        .def("shutdown", [](PyEngine& self) { self.engine->shutdown(); }, nb::call_guard<WithoutGil>());
}

}  // namespace castiron::bindings
