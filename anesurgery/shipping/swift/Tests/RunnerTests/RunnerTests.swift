import Foundation
import XCTest

@testable import Runner

/// The likeliest tokens after a prompt, as the interpreter wrote them. `RUNNER_FOLDER` names the folder.
final class RunnerTests: XCTestCase {
    struct Fixture: Decodable {
        let prompt: [Int32]
        let written: [Int32]
    }

    func testWritesWhatTheInterpreterWrites() async throws {
        guard let place = ProcessInfo.processInfo.environment["RUNNER_FOLDER"] else {
            throw XCTSkip("set RUNNER_FOLDER to the folder that was built")
        }
        let url = try XCTUnwrap(Bundle.module.url(forResource: "fixture", withExtension: "json"))
        let fixture = try JSONDecoder().decode(Fixture.self, from: Data(contentsOf: url))
        let runner = try await Runner(URL(fileURLWithPath: place))
        var written: [Int32] = []
        for try await token in runner.generate(fixture.prompt, steps: fixture.written.count) {
            written.append(token)
        }
        XCTAssertEqual(written, fixture.written)
    }
}
