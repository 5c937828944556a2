#include "pass/session.hpp"

#include <exception>
#include <future>
#include <optional>

#include "api/core.h"
#include "api/generation.h"
#include "bundle/remembered.h"
#include "errors.h"
#include "pass/text.hpp"

namespace pass {

Bundle::Bundle(const std::filesystem::path& path, bool verify) {
    Manifest manifest = read_manifest(path);
    Remembered remembered;
    verify_files(path, manifest, verify, &remembered);
    remembered.save();
    data_ = std::make_unique<Data>(Data{path, std::move(manifest)});
}

Bundle::Bundle(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Bundle::Bundle(Bundle&&) noexcept = default;
Bundle& Bundle::operator=(Bundle&&) noexcept = default;
Bundle::~Bundle() = default;

const std::filesystem::path& Bundle::path() const { return data_->path; }
const std::string& Bundle::name() const { return data_->manifest.model.name; }
std::int64_t Bundle::vocab_size() const { return data_->manifest.model.vocab_size; }
std::int64_t Bundle::max_capacity() const { return data_->manifest.model.max_capacity; }
int Bundle::lookahead() const { return static_cast<int>(data_->manifest.lookahead.length); }
const std::string& Bundle::rule() const { return data_->manifest.rule; }
const std::string& Bundle::dtype() const { return data_->manifest.model.dtype; }
const std::string& Bundle::weights() const { return data_->manifest.model.weights; }
const std::string& Bundle::lookahead_source() const { return data_->manifest.lookahead.source; }
const std::vector<std::int64_t>& Bundle::eos_token_ids() const { return data_->manifest.model.eos_token_ids; }
std::optional<std::int64_t> Bundle::bos_token_id() const { return data_->manifest.model.bos_token_id; }

Session::Session(Bundle bundle, const LoadOptions& options) {
    const Manifest& manifest = bundle.data_->manifest;  // its address does not change when the bundle is moved
    core_ = Core::open(std::move(bundle), manifest, options);
}

Session::Session(std::shared_ptr<Core> core) : core_(std::move(core)) {}

Session Session::load(const std::filesystem::path& path, const LoadOptions& options) {
    options.check();
    Bundle bundle(path, false);
    if (!options.verify) return Session(std::move(bundle), options);
    // Hashes are compared while ONNX Runtime loads, since both take long. Where both fail the hash error is thrown: a
    // damaged file explains why loading failed.
    std::future<void> hashes = std::async(std::launch::async, [manifest = bundle.data_->manifest, &path] {
        Remembered remembered;
        verify_files(path, manifest, true, &remembered);
        remembered.save();
    });
    std::optional<Session> session;
    std::exception_ptr failure;
    try {
        session.emplace(std::move(bundle), options);
    } catch (...) {
        failure = std::current_exception();
    }
    hashes.get();
    if (failure != nullptr) std::rethrow_exception(failure);
    return std::move(*session);
}

Session::Session(Session&&) noexcept = default;

Session& Session::operator=(Session&& other) noexcept {
    std::swap(core_, other.core_);
    return *this;
}

Session::~Session() {
    if (core_ == nullptr) return;
    try {
        const Error gone("the session was destroyed before this generation had ended; keep it until that was read");
        core_->close({FinishReason::error, {}, std::make_exception_ptr(gone)});
    } catch (...) {  // for lack of memory: a destructor must not throw
    }
}

Generation Session::submit(Request request, const Tokenizer* tokenizer) {
    const std::vector<std::string>& stop = request.options.stop;
    if (tokenizer == nullptr && !stop.empty()) {
        throw Error("stop strings need text: give a tokenizer, or use stop_token_ids");
    }
    std::unique_ptr<TextReader> reader = tokenizer != nullptr ? tokenizer->reader(stop) : nullptr;
    return Generation(std::make_unique<Generation::Data>(core_, core_->submit(request, std::move(reader))));
}

bool Session::step() { return core_->step(); }

void Session::close() { core_->close(); }

std::pair<std::string, int> Session::mode(const GenerateOptions& options) const {
    const Mode found = core_->mode(options);
    return {found.name, std::max(found.lookahead, found.ngram_drafts)};
}

const Bundle& Session::bundle() const { return core_->bundle(); }

std::string Session::device() const { return core_->capabilities().device; }

}  // namespace pass
