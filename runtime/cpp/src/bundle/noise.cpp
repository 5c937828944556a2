#include "bundle/noise.h"

namespace pass {

Words4 philox4x32(Words4 counter, Words2 key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t first = std::uint64_t{counter[0]} * 0xD2511F53u;
        const std::uint64_t second = std::uint64_t{counter[2]} * 0xCD9E8D57u;
        counter = {static_cast<std::uint32_t>(second >> 32) ^ counter[1] ^ key[0],
                   static_cast<std::uint32_t>(second),
                   static_cast<std::uint32_t>(first >> 32) ^ counter[3] ^ key[1],
                   static_cast<std::uint32_t>(first)};
        key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
    }
    return counter;
}

void noise_offsets(std::uint64_t seed, std::uint32_t stream, std::int64_t first,
                   std::span<std::int64_t> offsets) {
    const Words2 key{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    for (std::size_t i = 0; i + 1 < offsets.size(); i += 2) {
        const std::uint64_t position = static_cast<std::uint64_t>(first) + i / 2;
        const Words4 words = philox4x32({static_cast<std::uint32_t>(position),
                                         static_cast<std::uint32_t>(position >> 32), stream, 0},
                                        key);
        offsets[i] = words[0] >> 17;  // an offset has 15 bits
        offsets[i + 1] = words[1] >> 17;
    }
}

}  // namespace pass
