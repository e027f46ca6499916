import Foundation

/// Chooses a token from logits; by default the likeliest.
public struct Sampler {
    public var temperature = 0.0
    public var topK = 0
    public var topP = 1.0
    public var minP = 0.0
    public var repetitionPenalty = 1.0
    var random: SplitMix

    public init(_ sampling: [String: Double] = [:], seed: UInt64 = 0) {
        temperature = sampling["temperature"] ?? 0
        topK = Int(sampling["top_k"] ?? 0)
        topP = sampling["top_p"] ?? 1
        minP = sampling["min_p"] ?? 0
        repetitionPenalty = sampling["repetition_penalty"] ?? 1
        random = SplitMix(state: seed)
    }

    public mutating func choose(_ given: [Float], read: [Int32]) -> Int32 {
        var logits = given.map { Double($0) }
        if repetitionPenalty != 1 {
            for token in Set(read) {
                let old = logits[Int(token)]
                logits[Int(token)] = old > 0 ? old / repetitionPenalty : old * repetitionPenalty
            }
        }
        guard temperature > 0 else {
            return Int32(logits.indices.reduce(0) { logits[$1] > logits[$0] ? $1 : $0 })
        }
        let order = logits.indices.sorted { logits[$0] > logits[$1] }
        let kept = topK > 0 ? Array(order.prefix(topK)) : order
        let largest = logits[order[0]]
        var weights = kept.map { exp((logits[$0] - largest) / temperature) }
        let total = weights.reduce(0, +)
        var before = 0.0
        for i in weights.indices {
            let share = weights[i] / total
            if before >= topP || weights[i] < minP * weights[0] { weights[i] = 0 }
            before += share
        }
        var left = random.unit() * weights.reduce(0, +)
        for i in weights.indices {
            left -= weights[i]
            if left < 0 { return Int32(kept[i]) }
        }
        return Int32(kept[0])
    }
}

/// Random numbers that are the same for the same seed.
struct SplitMix {
    var state: UInt64

    mutating func unit() -> Double {
        state &+= 0x9E37_79B9_7F4A_7C15
        var mixed = state
        mixed = (mixed ^ (mixed >> 30)) &* 0xBF58_476D_1CE4_E5B9
        mixed = (mixed ^ (mixed >> 27)) &* 0x94D0_49BB_1331_11EB
        return Double((mixed ^ (mixed >> 31)) >> 11) / Double(UInt64(1) << 53)
    }
}
