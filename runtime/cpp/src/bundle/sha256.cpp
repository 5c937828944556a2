#include "bundle/sha256.h"

#include <openssl/evp.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "errors.h"

namespace pass {

namespace {

class Digest {
   public:
    Digest() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
        check(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
    }
    void update(const void* data, std::size_t size) { check(EVP_DigestUpdate(context_.get(), data, size) == 1); }
    std::string hex() {
        std::array<unsigned char, 32> bytes{};
        check(EVP_DigestFinal_ex(context_.get(), bytes.data(), nullptr) == 1);
        std::string text;
        for (const unsigned char byte : bytes) {
            text += "0123456789abcdef"[byte >> 4];
            text += "0123456789abcdef"[byte & 15];
        }
        return text;
    }

   private:
    static void check(bool good) {
        if (!good) throw Error("OpenSSL computes no SHA-256 here");
    }

    std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace

std::string sha256(std::string_view data) {
    Digest digest;
    digest.update(data.data(), data.size());
    return digest.hex();
}

std::string sha256_of_file(const std::filesystem::path& path) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
    const auto fail = [&] { throw Error("cannot read " + path.string() + ": " + std::strerror(errno)); };
    if (!file) fail();
    std::setvbuf(file.get(), nullptr, _IONBF, 0);
    std::vector<char> piece(std::size_t{1} << 20);
    Digest digest;
    while (const std::size_t size = std::fread(piece.data(), 1, piece.size(), file.get())) {
        digest.update(piece.data(), size);
    }
    if (std::ferror(file.get()) != 0) fail();
    return digest.hex();
}

}  // namespace pass
