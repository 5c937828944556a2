#include "bundle/manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bundle/integrity.h"
#include "bundle/noise.h"
#include "bundle/window.h"
#include "errors.h"
#include "utf8.h"

namespace pass {

namespace {

using Json = nlohmann::json;

constexpr int max_nesting = 200;                            // of lists and objects, as in Python
constexpr std::int64_t max_number = std::int64_t{1} << 53;  // so that sums cannot overflow
constexpr std::int64_t max_width = std::int64_t{1} << 30;   // of what becomes an int

constexpr const char* export_again = "export the bundle again";

// nlohmann's messages begin with "[json.exception.type_error.302] ".
std::string reason_of(const std::exception& error) {
    const std::string message = error.what();
    const std::size_t end = message.starts_with("[json.") ? message.find("] ") + 2 : 0;
    return one_line(message.substr(end));
}

// The digest says who wrote the manifest, so types and bounds are checked only where a wrong value
// would crash.
std::int64_t whole(const Json& value, std::int64_t min, std::int64_t max = max_number) {
    if (value.is_number_unsigned()) {
        const auto number = value.get<std::uint64_t>();
        if (number >= static_cast<std::uint64_t>(min) && number <= static_cast<std::uint64_t>(max))
            return static_cast<std::int64_t>(number);
    }
    throw Error(one_line(value.dump()) + " is not a whole number from " + std::to_string(min) +
                " to " + std::to_string(max));
}

// A plain name, which cannot lead out of the bundle's directory.
std::string file_name(const Json& value) {
    std::string name = value;
    const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
    const auto inside = [&](char c) { return plain(c) || c == '.' || c == '-'; };
    if (!name.empty() && name.size() <= 100 && plain(name[0]) &&
        std::all_of(name.begin(), name.end(), inside))
        return name;
    throw Error(one_line(name) + " is not a plain file name, so it could point outside the bundle");
}

template <class Read>
auto list(const Json& json, const Read& read) {
    std::vector<decltype(read(json))> result;
    for (const Json& item : json.get_ref<const Json::array_t&>()) result.push_back(read(item));
    return result;
}

template <class Read>
auto mapping(const Json& json, const Read& read) {
    std::map<std::string, decltype(read(json))> result;
    for (const auto& [key, item] : json.get_ref<const Json::object_t&>())
        result.emplace(key, read(item));
    return result;
}

std::string string_of(const Json& json) { return json; }

Integers numbers(const Json& json, std::int64_t min, std::int64_t max) {
    return list(json, [=](const Json& item) { return whole(item, min, max); });
}

Tensor read_tensor(const Json& json) {
    const auto read_size = [](const Json& size) {
        return size.is_string() ? Dimension(string_of(size)) : Dimension(whole(size, 0));
    };
    return {json.at("name"), json.at("dtype"), list(json.at("shape"), read_size)};
}

Graph read_graph(const Json& json) {
    return {file_name(json.at("file")), list(json.at("inputs"), read_tensor),
            list(json.at("outputs"), read_tensor)};
}

DerivedTrunk read_derived(const Json& json) {
    DerivedTrunk result{file_name(json.at("file")), json.at("device"), {}};
    if (const Json batch = json.value("batch", Json()); !batch.is_null())
        result.batch = whole(batch, 1);
    result.lookahead_rows = json.value("lookahead_rows", true);
    return result;
}

ModelInfo read_model(const Json& json) {
    ModelInfo result;
    result.name = json.at("name");
    result.dtype = json.at("dtype");
    result.weights = json.at("weights");
    for (const auto& [name, size] :
         {std::pair{"vocab_size", &result.vocab_size},
          std::pair{"hidden_size", &result.hidden_size}, std::pair{"heads", &result.heads},
          std::pair{"kv_heads", &result.kv_heads}, std::pair{"head_dim", &result.head_dim},
          std::pair{"max_capacity", &result.max_capacity}}) {
        *size = whole(json.at(name), 1);
    }
    result.eos_token_ids = numbers(json.at("eos_token_ids"), 0, result.vocab_size - 1);
    if (const Json& bos = json.at("bos_token_id"); !bos.is_null())
        result.bos_token_id = whole(bos, 0, result.vocab_size - 1);
    return result;
}

LookaheadInfo read_lookahead(const Json& json) {
    return {whole(json.at("length"), 1, max_lookahead), json.at("source"),
            json.at("acceptance_per_position"), json.at("acceptance_per_position_sampled")};
}

FileInfo read_file(const Json& json) { return {json.at("sha256"), whole(json.at("bytes"), 0)}; }

// [min, opt, max]
Profile::Range read_range(const Json& json) { return {whole(json.at(0), 0), whole(json.at(2), 0)}; }

EngineFile read_engine(const Json& json) {
    const auto read_profile = [](const Json& profile) {
        return Profile{mapping(profile.at("sizes"), read_range)};
    };
    return {file_name(json.at("graph")), file_name(json.at("file")), read_file(json),
            list(json.at("profiles"), read_profile), mapping(json.at("aliases"), string_of)};
}

EngineSet read_engines(const Json& json) {
    EngineSet result{file_name(json.at("directory")),
                     json.at("library"),
                     json.at("version"),
                     list(json.at("targets"), string_of),
                     json.at("bundle"),
                     whole(json.at("lookahead"), 1, max_lookahead),
                     whole(json.at("max_batch_size"), 1),
                     numbers(json.at("capacities"), 1, max_number),
                     numbers(json.at("prefill_widths"), 1, max_width),
                     list(json.at("engines"), read_engine)};
    if (result.capacities.empty()) throw Error("an engine set has no capacities");
    return result;
}

Manifest read_document(const Json& json) {
    const Json noise{{"scheme", noise_scheme},
                     {"members", noise_block_size},
                     {"row", noise_row_entries},
                     {"bits", noise_bits}};
    if (json.at("noise") != noise) throw Error("its noise is not this version's " + noise.dump());
    Manifest result{read_model(json.at("model")),
                    read_lookahead(json.at("lookahead")),
                    json.at("rule"),
                    read_graph(json.at("trunk")),
                    list(json.at("derived"), read_derived),
                    {},
                    read_graph(json.at("logprobs")),
                    read_graph(json.at("processors")),
                    mapping(json.at("files"), read_file),
                    list(json.at("engines"), read_engines)};
    for (const Json& window : json.at("windows").get_ref<const Json::array_t&>())
        result.windows[window.at("name")] = mapping(window.at("tails"), read_graph);
    for (const auto& [name, info] : result.files) file_name(name);
    return result;
}

Json parse(const std::string& text, const std::string& path) {
    const auto limit_depth = [](int depth, Json::parse_event_t, Json&) {
        if (depth > max_nesting) throw Error("recursion limit exceeded");
        return true;
    };
    try {
        if (text.starts_with("\xEF\xBB\xBF")) throw Error("it begins with a byte order mark");
        return Json::parse(text, limit_depth);
    } catch (const std::exception& error) {
        throw Error(path + ": file: Invalid JSON: " + reason_of(error));
    }
}

void check_version(const Json& document, const std::string& path) {
    if (!document.is_object() || document.value("format", Json()) != "pass-bundle")
        throw Error(path + ": it is not the manifest of a bundle");
    const Json version = document.value("version", Json());
    if (version != manifest_version) {
        throw Error(path + ": manifest version " + one_line(version.dump()) + " is not " +
                    std::to_string(manifest_version) + "; " + export_again);
    }
}

}  // namespace

bool Profile::admits(const std::map<std::string, std::int64_t>& dimensions) const {
    return std::all_of(sizes.begin(), sizes.end(), [&](const auto& item) {
        const auto size = dimensions.find(item.first);
        return size != dimensions.end() && item.second.min <= size->second &&
               size->second <= item.second.max;
    });
}

std::string Manifest::content_hash() const {
    std::string lines;
    for (const auto& [name, info] : files) {
        if (name.ends_with(".onnx") || name.ends_with(".data"))
            lines += name + " " + info.sha256 + "\n";
    }
    return sha256(lines);
}

const DerivedTrunk* Manifest::derived_trunk(const std::string& device, int slots,
                                            bool lookahead_rows) const {
    const auto preference = [](const DerivedTrunk& each) {
        return std::pair(each.batch.has_value(), !each.lookahead_rows);
    };
    const DerivedTrunk* preferred = nullptr;
    for (const DerivedTrunk& each : derived) {
        if (each.device != device || each.batch.value_or(slots) != slots) continue;
        if (lookahead_rows && !each.lookahead_rows) continue;
        if (preferred == nullptr || preference(each) > preference(*preferred)) preferred = &each;
    }
    return preferred;
}

std::set<std::string> Manifest::graph_files() const {
    std::set<std::string> names{trunk.file, logprobs.file, processors.file};
    for (const auto& [window, tails] : windows) {
        for (const auto& [sampler, tail] : tails) names.insert(tail.file);
    }
    for (const DerivedTrunk& each : derived) names.insert(each.file);
    return names;
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
    const Json document = parse(text, path);
    check_version(document, path);
    Json digested = document;
    digested.erase("engines");
    digested.erase("digest");
    if (document.value("digest", Json()) != sha256(digested.dump()))
        throw Error(path + " was edited after the export (its digest differs): " + export_again);
    try {
        return read_document(document);
    } catch (const std::exception& error) {
        throw Error(path + ": " + reason_of(error) + "; " + export_again);
    }
}

Manifest read_manifest(const std::filesystem::path& bundle) {
    const std::filesystem::path path = bundle / manifest_file;
    const auto text = read_text_file(path);
    if (!text) {
        throw Error(bundle.string() + " is not a bundle: it has no " + manifest_file +
                    " (make one with pass-export)");
    }
    return parse_manifest(*text, path.string());
}

}  // namespace pass
