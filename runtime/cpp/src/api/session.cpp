#include "pass/session.hpp"

#include <exception>
#include <future>

#include "api/core.h"
#include "bundle/integrity.h"
#include "decode/sequence.h"
#include "errors.h"
#include "pass/text.hpp"

namespace pass {

Bundle::Bundle(const std::filesystem::path& path, bool verify) {
    auto before = identities(path);
    Manifest manifest = read_manifest(path);
    verify_files(path, manifest, verify);
    data_ = std::make_shared<const Data>(Data{path, std::move(manifest), std::move(before)});
}

Bundle::Bundle(std::shared_ptr<const Data> data) : data_(std::move(data)) {}

const std::filesystem::path& Bundle::path() const { return data_->path; }
const std::string& Bundle::name() const { return data_->manifest.model.name; }
std::int64_t Bundle::vocab_size() const { return data_->manifest.model.vocab_size; }
std::int64_t Bundle::max_capacity() const { return data_->manifest.model.max_capacity; }
int Bundle::lookahead() const { return static_cast<int>(data_->manifest.lookahead.length); }
const std::string& Bundle::rule() const { return data_->manifest.rule; }
const std::string& Bundle::dtype() const { return data_->manifest.model.dtype; }
const std::string& Bundle::weights() const { return data_->manifest.model.weights; }
const std::string& Bundle::lookahead_source() const { return data_->manifest.lookahead.source; }
const std::vector<std::int64_t>& Bundle::eos_token_ids() const {
    return data_->manifest.model.eos_token_ids;
}
std::optional<std::int64_t> Bundle::bos_token_id() const {
    return data_->manifest.model.bos_token_id;
}

Session::Session(Bundle bundle, const LoadOptions& options)
    : core_(Core::open(bundle, *bundle.data_, options)) {}

Session::Session(std::shared_ptr<Core> core) : core_(std::move(core)) {}

Session Session::load(const std::filesystem::path& path, const LoadOptions& options) {
    options.check();
    const Bundle bundle(path, false);
    if (!options.verify) return Session(bundle, options);
    // Hashes are compared while the graphs are loaded, because both take long. If both fail, the
    // error of the hashes is thrown, because a damaged file explains why loading failed.
    const Bundle::Data& data = *bundle.data_;
    std::future<void> hashes =
        std::async(std::launch::async, [&] { verify_files(path, data.manifest, true); });
    std::optional<Session> session;
    std::exception_ptr failure;
    try {
        session.emplace(bundle, options);
    } catch (...) {
        failure = std::current_exception();
    }
    hashes.wait();
    check_unchanged(path, data.manifest, data.identities);
    hashes.get();
    if (failure != nullptr) std::rethrow_exception(failure);
    return std::move(*session);
}

Session::Session(Session&&) noexcept = default;

Session& Session::operator=(Session&& other) noexcept {
    std::swap(core_, other.core_);  // the destructor of `other` closes the former core
    return *this;
}

Session::~Session() {
    if (core_ == nullptr) return;
    try {
        const Error destroyed(
            "the session was destroyed before this generation had ended; keep it until then");
        core_->close({FinishReason::error, {}, std::make_exception_ptr(destroyed)});
    } catch (...) {  // Memory ran out, and a destructor must not throw.
    }
}

bool Session::step() { return core_->step(); }

void Session::warm_up(const std::vector<SamplingParams>& samplings) { core_->warm_up(samplings); }

std::map<std::string, std::string> Session::uncaptured() const { return core_->uncaptured(); }

void Session::close() { core_->close(); }

const Bundle& Session::bundle() const { return core_->bundle(); }

std::string Session::device() const { return core_->capabilities().device; }

struct Generation::Data {
    std::shared_ptr<Core> core;
    std::shared_ptr<SequenceState> sequence;
    std::vector<Token> tokens{};
    std::string text{};
    std::optional<End> end{};
};

Generation Session::submit(Request request, const Tokenizer* tokenizer) {
    const std::vector<std::string>& stop = request.options.stop;
    if (tokenizer == nullptr && !stop.empty())
        throw Error("stop strings need text: give a tokenizer, or use stop_token_ids");
    request.options.check();
    std::unique_ptr<TextReader> reader;
    if (tokenizer != nullptr)
        reader = tokenizer->reader(stop, request.prompt_ids, request.options.min_tokens);
    return Generation(std::make_unique<Generation::Data>(
        Generation::Data{core_, core_->submit(request, std::move(reader))}));
}

Generation::Generation(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Generation::Generation(Generation&&) noexcept = default;

Generation& Generation::operator=(Generation&& other) noexcept {
    std::swap(data_, other.data_);  // the destructor of `other` cancels the former one
    return *this;
}

Generation::~Generation() {
    if (data_ != nullptr) cancel();
}

std::optional<Event> Generation::next() {
    if (!data_->end) data_->core->wait(*data_->sequence);
    return poll();
}

std::optional<Event> Generation::poll() {
    if (data_->end) return std::nullopt;
    SequenceState& sequence = *data_->sequence;
    std::unique_lock lock(sequence.signals->mutex);
    if (!sequence.output.events.empty()) {
        Event event = std::move(sequence.output.events.front());
        sequence.output.events.pop_front();
        lock.unlock();
        data_->tokens.insert(data_->tokens.end(), event.tokens.begin(), event.tokens.end());
        data_->text += event.text;
        return event;
    }
    data_->end = sequence.output.end;
    lock.unlock();
    if (data_->end && data_->end->error != nullptr) std::rethrow_exception(data_->end->error);
    return std::nullopt;
}

void Generation::run() {
    while (next()) {
    }
}

void Generation::cancel() { data_->sequence->cancelled = true; }

const std::vector<Token>& Generation::tokens() const { return data_->tokens; }

std::vector<std::int64_t> Generation::token_ids() const {
    std::vector<std::int64_t> ids;
    for (const Token& token : data_->tokens) ids.push_back(token.id);
    return ids;
}

const std::string& Generation::text() const { return data_->text; }

std::optional<FinishReason> Generation::finish_reason() const {
    return data_->end ? std::optional(data_->end->reason) : std::nullopt;
}

StopReason Generation::stop_reason() const { return data_->end ? data_->end->stop : StopReason{}; }

const std::vector<std::int64_t>& Generation::prompt_ids() const {
    return data_->sequence->request.prompt_ids;
}

std::uint64_t Generation::seed() const {
    return data_->sequence->request.sampling.seed.value_or(0);
}

bool Generation::logprobs() const { return data_->sequence->request.logprobs.has_value(); }

Stats Generation::stats() const {
    const std::lock_guard lock(data_->sequence->signals->mutex);
    return data_->sequence->output.stats;
}

const char* name_of(FinishReason reason) {
    switch (reason) {
        case FinishReason::stop: return "stop";
        case FinishReason::length: return "length";
        case FinishReason::cancelled: return "cancelled";
        default: return "error";
    }
}

const char* name_of(TokenSource source) {
    switch (source) {
        case TokenSource::model: return "model";
        case TokenSource::lookahead: return "lookahead";
        default: return "ngram";
    }
}

}  // namespace pass
