// A RecitingBackend that also writes K/V.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "reciting.h"

namespace pass::test {

using Tokens = std::vector<std::int64_t>;

// The K/V of a token are a function of the token and of the entry before, as in a model.
class RememberingBackend : public RecitingBackend {
   public:
    explicit RememberingBackend(int slots, std::shared_ptr<Allocator> allocator = nullptr,
                                bool same_entries = true)
        : RecitingBackend(manifest_, slots, std::move(allocator)) {
        capabilities_.same_entries = same_entries;
    }

    bool holds(int slot, std::span<const std::int64_t> tokens) {
        float value = 0;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            value = value_after(value, tokens[i]);
            for (int part = 0; part < parts; ++part) {
                const float* entry = entry_at(slot, part, static_cast<std::int64_t>(i));
                if (entry[0] != value + static_cast<float>(part) || entry[1] != -value)
                    return false;
            }
        }
        return true;
    }

    std::int64_t num_prefilled = 0;  // prompt tokens that were prefilled

   protected:
    void run_prefill(int slot, const Window& window) override {
        RecitingBackend::run_prefill(slot, window);
        const Tokens ids = prompt_input("input_ids", {1, window.width()});
        write(slot, prompt_input("length", {1}).front(), ids);
        num_prefilled += prompt_input("logit_rows", {1}).front() + 1;
    }

    PassResult run_pass(const PassKind& kind) override {
        const int width = kind.window.width();
        const Tokens lengths = buffers_.read<std::int64_t>("length", kind.batch, {});
        const Tokens active = buffers_.read<std::int64_t>("active", kind.batch, {});
        const Tokens ids = buffers_.read<std::int64_t>("input_ids", kind.batch, {width});
        const PassResult result = RecitingBackend::run_pass(kind);
        for (int slot = 0; slot < kind.batch; ++slot) {
            const auto at = static_cast<std::size_t>(slot);
            const auto window = ids.begin() + slot * width;
            if (active[at] != 0) write(slot, lengths[at], {window, window + result.count[at]});
        }
        return result;
    }

   private:
    static constexpr int parts = 4;  // two tensors of two heads

    static Manifest two_heads() {
        Manifest manifest = reciting_manifest();
        manifest.model.kv_heads = 2;
        manifest.trunk.inputs.push_back(manifest.trunk.inputs.front());
        manifest.trunk.inputs.back().name = "past_value.0";
        return manifest;
    }
    Tokens prompt_input(const std::string& name, const Shape& shape) {
        Tokens values(static_cast<std::size_t>(shape.back()));
        const std::byte* address =
            buffers_.address_of({name, prefill_scope + name, shape, "int64", false, nullptr});
        memory_->download(values.data(), address, values.size() * sizeof values[0]);
        return values;
    }
    static float value_after(float value, std::int64_t token) {
        return static_cast<float>((static_cast<std::int64_t>(value) * 31 + token + 1) % 65521);
    }
    float* entry_at(int slot, int part, std::int64_t position) {
        std::byte* place = cache_.address(static_cast<std::size_t>(part / 2), slot);
        return reinterpret_cast<float*>(place) + 2 * (part % 2 * cache_.shape(1)[2] + position);
    }
    // Write the K/V of `tokens` after `length` entries of `slot`.
    void write(int slot, std::int64_t length, const Tokens& tokens) {
        float value = length == 0 ? 0 : -entry_at(slot, 0, length - 1)[1];
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            value = value_after(value, tokens[i]);
            for (int part = 0; part < parts; ++part) {
                float* entry = entry_at(slot, part, length + static_cast<std::int64_t>(i));
                entry[0] = value + static_cast<float>(part);
                entry[1] = -value;
            }
        }
    }

    inline static const Manifest manifest_ = two_heads();
};

}  // namespace pass::test
