#include "bundle/metadata.h"

#include <nlohmann/json.hpp>

#include "errors.h"

namespace pass {

Ordered<std::variant<std::int64_t, std::string>> trunk_metadata(const Manifest& manifest) {
    const ModelInfo& model = manifest.model;
    return {{"model.dtype", model.dtype},
            {"model.weights", model.weights},
            {"model.vocab_size", model.vocab_size},
            {"model.hidden_size", model.hidden_size},
            {"model.layers", model.layers},
            {"model.heads", model.heads},
            {"model.kv_heads", model.kv_heads},
            {"model.head_dim", model.head_dim},
            {"model.max_capacity", model.max_capacity},
            {"lookahead.length", manifest.lookahead.length},
            {"rule", manifest.rule}};
}

void check_trunk_metadata(const Manifest& manifest, const std::string& stated) {
    const auto found = nlohmann::json::parse(stated, nullptr, false);
    for (const auto& [name, value] : trunk_metadata(manifest)) {
        const nlohmann::json expected = std::visit([](const auto& one) { return nlohmann::json(one); }, value);
        const nlohmann::json actual = found.is_object() ? found.value(name, nlohmann::json()) : nlohmann::json();
        if (actual == expected) continue;
        const auto text = [](const nlohmann::json& one) {
            return one.is_null() ? "None" : one.is_string() ? one.get<std::string>() : one.dump();
        };
        throw Error("the manifest says " + name + " " + text(expected) + " and " + manifest.trunk.file + " " +
                    text(actual) + "; export the bundle again");
    }
}

}  // namespace pass
